"""Layers on a packed cache against the same layers without one, on the same stored inputs.

Quantised rows make an end-to-end comparison meaningless: a sum in another order moves a value
across a rounding boundary here and there, and everything behind it. So each layer gets the streams
that entered it in a forward without a cache, in calls of any lengths. What it stores must be, to
the bit, what quantising its own float rows gives, and its attention must be that of the forward
without a cache wherever the keys that a query sees are the same ones.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx
from formats_oracle import ELEMENT, oracle_dequantise, oracle_quantise
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch
from hysparse.nn.block import Block
from hysparse.nn.calls import Call
from hysparse.nn.execution import Execution

LENGTH = 24  # tokens of each of two sequences, and of the one width of call beside single tokens
BATCH = 2
# The same function with products summed in another order; bfloat16 activations are rounded then.
TOLERANCE = {"kvquant": 2e-5, "official": 2e-2}
# Of the queries, at least this many must see the same keys: the others are not compared. Rounding
# of activations makes neighbouring values of them, and so of what is stored.
COMPARED = {"kvquant": 0.98, "official": 0.9}


@functools.partial(jax.jit, static_argnums=0)
def observed(graphdef, state, batch, cache=None, inputs=None):
  """(for each layer what entered it, the rows it stored and its attention; the cache).

  Args:
    inputs: streams and folds that each layer gets in place of those of the layer before it.
  """
  layers, plain_call = [], Block.__call__
  plain_store, plain_append = Execution.store, Execution.append

  def layer(block, carry, *others):
    carry = carry if inputs is None else inputs[len(layers)]
    layers.append({"carry": carry, "rows": []})
    passed = plain_call(block, carry, *others)
    layers[-1] |= {name: passed.aux.trace.get(name) for name in ("attention", "ids")}
    return passed

  def store(run, x, format, *, packed):
    kept = plain_store(run, x, format, packed=packed)
    layers[-1]["rows"].append((x, kept))
    return kept

  def append(run, pool, ids, x, valid):
    layers[-1]["rows"].append((x, None))
    return plain_append(run, pool, ids, x, valid)

  watched = {"store": store, "append": append}
  with mock.patch.object(Block, "__call__", layer), mock.patch.multiple(Execution, **watched):
    hidden = nnx.merge(graphdef, state).hidden(batch, cache, Call(capture=True))
  return layers, hidden.cache


def quantised(x, format):
  """Parts of rows [..., C] as a cache holds them, and their values; in NumPy."""
  if format == "bf16":
    return {"values": x.astype(jnp.bfloat16)}, x.astype(jnp.bfloat16).astype(np.float32)
  codes, scales = oracle_quantise(np.float32(x), format)
  values = oracle_dequantise(codes, scales, format)
  if ELEMENT[format] == "e2m1":  # channel i low, channel i + half high
    width = x.shape[-1]
    half = -(-width // 2)
    high = np.pad(codes[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - width)])
    codes = codes[..., :half] | high << 4
  return {"codes": codes, "scales": scales}, values


def names(spec):
  """What a layer stores, in this order; index queries are rounded, too."""
  if not spec.has_window:
    return ["keys", "values"]
  own = ["main_kv"] * spec.is_source + ["index_keys"] * spec.owns_index_keys
  return ["window", *own, *["queries"] * spec.has_indexer]


def rows_of(layer, spec):
  return dict(zip(names(spec), layer["rows"], strict=True))


@functools.cache
def without_cache(cfg):
  batch = Batch.of(small.tokens(cfg, BATCH, LENGTH))
  return jax.device_get(observed(*small.model(cfg), batch)[0])


class Fed:
  """What the layers did with two sequences in calls of these lengths.

  Attributes:
    cache: after the last call.
    length: tokens of each sequence.
    attention: [B, LENGTH, D] of each layer, ids: [B, LENGTH, K]; NaN or -2 where no token was fed.
    floats: by (layer, name), rows before they were quantised, by token or entry; NaN for none.
  """

  def __init__(self, cfg, calls):
    self.cfg, self.length = cfg, np.zeros(BATCH, int)
    tokens = np.asarray(small.tokens(cfg, BATCH, LENGTH))
    inputs = [layer["carry"] for layer in without_cache(cfg)]
    self.cache = allocate(cfg, BATCH, LENGTH, block_tokens=cfg.model.alignment)
    self.attention, self.ids, self.floats = {}, {}, {}
    for counts in calls:
      width = 1 if max(counts) <= 1 else LENGTH
      at = np.minimum(self.length[:, None] + np.arange(width), LENGTH - 1)
      cut = lambda x: x[np.arange(BATCH)[:, None], at]  # noqa: B023, E731
      batch = Batch.of(cut(tokens), np.asarray(counts))
      found, self.cache = observed(*small.model(cfg), batch, self.cache, jax.tree.map(cut, inputs))
      for i, layer in enumerate(jax.device_get(found)):
        self._add(i, layer, counts)
      self.length += counts
    self.cache.check()
    self.cache = jax.device_get(self.cache)

  def _add(self, i, layer, counts):
    spec = self.cfg.model.layers[i]
    for b, (length, count) in enumerate(zip(self.length, counts, strict=True)):
      for into, name, nothing in ((self.attention, "attention", np.nan), (self.ids, "ids", -2)):
        if layer[name] is not None:
          rows = self._rows(into, i, layer[name], nothing)
          rows[b, length : length + count] = layer[name][b, :count]
      for name, (x, _) in rows_of(layer, spec).items():
        first, end = length, length + count
        if name in ("main_kv", "index_keys"):
          first, end = first // spec.ratio, end // spec.ratio
        if name != "queries":
          self._rows(self.floats, (i, name), x, np.nan)[b, first:end] = x[b, : end - first]

  def _rows(self, into, key, like, nothing):
    shape = (BATCH, LENGTH, *like.shape[2:])
    return into.setdefault(key, np.full(shape, nothing, np.result_type(like.dtype)))

  def format(self, name):
    """Of the dial."""
    model = self.cfg.model
    dial = {"main_kv": model.main_kv, "index_keys": model.index_k, "window": model.window_kv}
    return dial.get(name, "bf16")


def held(fed, i, name, b):
  """(tokens or entries, parts of their rows) that the cache holds of a sequence."""
  layers, spec = fed.cfg.model.layers, fed.cfg.model.layers[i]
  r, first = next(
    (r, first) for r, (first, count) in enumerate(layers.runs()) if first <= i < first + count
  )
  layer, length = fed.cache.layers[r], int(fed.length[b])
  if name == "window":
    window = fed.cfg.model.window
    positions = np.arange(max(0, length - window), length)
    tags = layer.window.tags_BxW[i - first, b, positions % window]
    np.testing.assert_array_equal(tags, positions)
    rows = jax.tree.map(lambda x: x[i - first, b][positions % window], layer.window.rows)
    return positions, rows.parts
  ratio = spec.ratio or 1
  entries = np.arange(length // ratio)
  pool = getattr(layer.pools[i - first], name)
  table = fed.cache.pages.table_BxJ[b]
  per_block = fed.cache.pages.tokens // ratio
  rows = table[entries // per_block] * per_block + entries % per_block
  return entries, jax.tree.map(lambda x: x[rows], pool).parts


def check_rows(fed):
  """The cache holds the float rows, quantised; returns their values, 0 where there are none."""
  values = {}
  for (i, name), floats in fed.floats.items():
    floats = np.asarray(floats, np.float32)
    there = ~np.isnan(floats.reshape(BATCH, LENGTH, -1)[..., 0])
    want, faked = quantised(np.nan_to_num(floats), fed.format(name))
    values[i, name] = faked
    for b in range(BATCH):
      at, parts = held(fed, i, name, b)
      assert there[b, at].all()
      for part, rows in parts.items():
        where = f"layer {i}, {name}, {part}"
        np.testing.assert_array_equal(rows, want[part][b, at], err_msg=where)
  return values


def check_against_the_forward_without_cache(fed):
  model, numerics = fed.cfg.model, fed.cfg.train.numerics
  tolerance, free = TOLERANCE[numerics], without_cache(fed.cfg)
  values, same = check_rows(fed), {}
  for (i, name), got in values.items():
    floats = np.asarray(fed.floats[i, name], np.float32)
    x, kept = rows_of(free[i], model.layers[i])[name]
    x, kept = (np.asarray(y, np.float32) for y in (x, kept.decode()))
    n = x.shape[1]  # entries of complete groups only
    error = np.abs(floats[:, :n] - x)
    error = error[~np.isnan(error)]
    assert error.max(initial=0) <= tolerance * max(1, np.abs(x).max()), (i, name)
    differs = (got[:, :n] != kept).reshape(BATCH, n, -1).any(-1)
    same[i, name] = np.pad(~differs, ((0, 0), (0, LENGTH - n)))
  fed_BxS = np.arange(LENGTH) < fed.length[:, None]
  for i, spec in enumerate(model.layers):
    agree = fed_BxS & sees_the_same(fed, i, same, free)
    assert agree.sum() >= COMPARED[numerics] * fed_BxS.sum(), i
    want = np.asarray(free[i]["attention"], np.float32)
    error = np.abs(np.asarray(fed.attention[i], np.float32) - want)[agree]
    assert error.max(initial=0) <= tolerance * np.abs(want).max(), (i, spec.mode)


def sees_the_same(fed, i, same, free):
  """[B, S]: whether the keys that a query sees are those it sees without a cache."""
  spec, positions = fed.cfg.model.layers[i], np.arange(LENGTH)
  back = positions[:, None] - positions
  if not spec.has_window:
    both = same[i, "keys"] & same[i, "values"]
    return (both[:, None] | (back < 0)).all(-1)
  near = (same[i, "window"][:, None] | (back < 0) | (back >= fed.cfg.model.window)).all(-1)
  if not spec.ratio:
    return near
  entries = same[spec.kv_source, "main_kv"]
  if spec.mode == "dense":
    visible = np.arange(LENGTH) < ((positions + 1) // spec.ratio)[:, None]
    return near & (entries[:, None] | ~visible).all(-1)
  ids = free[i]["ids"]
  chosen = np.take_along_axis(entries[:, None], np.maximum(ids, 0), axis=2) | (ids < 0)
  return near & chosen.all(-1) & (fed.ids[i] == ids).all(-1)


@st.composite
def calls(draw, single=True):
  """Calls of two sequences, of any lengths; if `single`, some are many single tokens."""
  made = []
  for n in draw(st.lists(st.tuples(*[st.integers(0, LENGTH)] * BATCH), min_size=1, max_size=4)):
    left = [LENGTH - sum(c[b] for c in made) for b in range(BATCH)]
    counts = tuple(min(a, b) for a, b in zip(n, left, strict=True))
    if single and sum(counts) <= 12 and draw(st.booleans()):
      steps = range(max(counts))
      made += [tuple(int(step < count) for count in counts) for step in steps]
    else:
      made.append(counts)
  return made


SPLITS = settings(derandomize=True, deadline=None, max_examples=6)
WHOLE = [(LENGTH, LENGTH)]
SINGLE = [(1, 1)] * LENGTH


def check(cfg, calls):
  check_against_the_forward_without_cache(Fed(cfg, calls))


@SPLITS
@given(calls(single=False))
@example(WHOLE)
def test_calls_of_any_lengths_of_a_source(calls):
  check(small.config("full/2", engram_layers=(0,), train={"numerics": "kvquant"}), calls)


@pytest.mark.slow
@SPLITS
@given(calls())
@example(WHOLE)
@example(SINGLE)
def test_calls_of_any_lengths_as_the_released_code_computes(calls):
  schedule = "full/2 reuse | full/1+candidates reindex"
  check(small.config(schedule, engram_layers=(1,), train={"numerics": "official"}), calls)


@pytest.mark.slow
@SPLITS
@given(calls())
@example(WHOLE)
@example(SINGLE)
def test_calls_of_any_lengths_in_the_other_modes(calls):
  dial = {"main_kv": "mxfp4", "index_k": "fp8", "window_kv": "fp4"}
  cfg = small.config("mha gqa/2 dense/3 reindex", window=7, train={"numerics": "kvquant"}, **dial)
  check(cfg, calls)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=3)
@given(
  st.sampled_from([1, 3, 4]),
  st.sampled_from([1, 3, 30]),
  st.sampled_from([("fp8", "bf16"), ("bf16", "fp4"), ("fp4", "fp8")]),
  st.lists(calls(single=False), min_size=4, max_size=4),
)
def test_any_ratio_window_and_format(ratio, window, formats, splits):
  main_kv, window_kv = formats
  cfg = small.config(
    f"full/{ratio} reuse",
    window=window,
    head_dim=34,
    main_kv=main_kv,
    window_kv=window_kv,
    train={"numerics": "kvquant"},
  )
  for calls in (WHOLE, *splits):
    check(cfg, calls)
