"""Properties of the whole model, in every mode, ratio and residual kind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import schedule as schedule_lib
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Call
from hysparse.nn.model import abstract
from hysparse.training.losses import loss_fn

# Float32 logits of the same function with products summed in another order.
LOGIT_TOLERANCE = 2e-5
# The same rows in the same shapes: only a different partner in a matrix product may differ.
SAME_SHAPE_TOLERANCE = 1e-6

LENGTH = 48  # a multiple of every alignment below


def close(a, b, tolerance):
  np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, np.abs(b).max()), rtol=0)


@st.composite
def configs(draw):
  """A random legal schedule with modes, ratios, a bar, candidates, Engram and a residual kind."""
  ratio = draw(st.sampled_from([1, 2, 3, 4]))
  source = draw(st.sampled_from(["full", "full", "dense"]))
  consumers = draw(st.lists(st.sampled_from(["reuse", "reindex"]), min_size=1, max_size=2))
  words = [draw(st.sampled_from(["swa", "mha", "gqa/2", "full/1", "full/2"]))]
  candidates = source == "full" and "reindex" in consumers and draw(st.booleans())
  words += [f"{source}/{ratio}" + ("+candidates" if candidates else ""), *consumers]
  bar = draw(st.booleans())
  text = f"{words[0]} | {' '.join(words[1:])}" if bar else " ".join(words)
  return small.config(
    text,
    residual=draw(st.sampled_from(["single_pass", "two_pass", "plain"])),
    engram_layers=draw(st.sampled_from([(), (0,), (1,), (0, 2)])),
    experts_per_prompt_token=draw(st.sampled_from([0, 1])),
  )


# Every mode alone and mixed, always run; hypothesis adds random combinations.
FIXED = (
  small.config(engram_layers=(1,)),
  small.config("swa*2", residual="plain"),
  small.config("dense/3 reuse reindex reuse", residual="two_pass"),
  small.config("mha gqa/2 full/4 reuse", engram_layers=(0,)),
)
fixed = pytest.mark.parametrize("cfg", FIXED, ids=lambda cfg: cfg.model.schedule)


def check_causality(cfg):
  tokens = small.tokens(cfg, 2, LENGTH)
  before = small.logits(cfg, Batch.of(tokens))
  for keep in (1, 17, 23, 40, 47):
    other = (jnp.roll(tokens, 1, axis=0) + 2) % cfg.model.vocab_size
    changed = jnp.where(jnp.arange(LENGTH) < keep, tokens, other)
    after = small.logits(cfg, Batch.of(changed))
    close(after[:, :keep], before[:, :keep], SAME_SHAPE_TOLERANCE)
    assert np.abs(after[:, keep:] - before[:, keep:]).max() > 1e-3, "the change was not seen"


def row_of(*documents, lengths):
  """One packed row: each document with padding up to the length given for it."""
  tokens, positions, valid = [], [], []
  for document, length in zip(documents, lengths, strict=True):
    pad = length - len(document)
    tokens.append(np.pad(document, (0, pad)))
    positions.append(np.arange(length))
    valid.append(np.arange(length) < len(document))
  tokens, positions = (np.concatenate(x).astype(np.int32) for x in (tokens, positions))
  return tokens, positions, np.concatenate(valid)


def batch_of(*rows):
  tokens, positions, valid = (jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True))
  return Batch(tokens, positions, valid, jnp.zeros_like(valid))


def check_isolation(cfg):
  """A document packed behind or before another has the logits it has alone."""
  align = cfg.model.alignment
  cut = LENGTH // 2 // align * align
  first, second = cut - align // 2, LENGTH - cut  # the first one ends in padding
  a, b = (np.asarray(small.tokens(cfg, 1, n, seed)[0]) for n, seed in ((first, 1), (second, 2)))
  nothing = np.zeros(0, np.int32)
  packed = row_of(a, b, lengths=(cut, second))
  alone_a = row_of(a, nothing, lengths=(cut, second))
  alone_b = row_of(b, nothing, lengths=(second, cut))
  got = small.logits(cfg, batch_of(packed, alone_a))
  want_b = small.logits(cfg, batch_of(alone_b, alone_b))[0]
  close(got[0, :first], got[1, :first], LOGIT_TOLERANCE)
  close(got[0, cut:], want_b[:second], LOGIT_TOLERANCE)


@fixed
def test_later_tokens_change_nothing(cfg):
  check_causality(cfg)


@fixed
def test_packed_documents_do_not_see_each_other(cfg):
  check_isolation(cfg)


@pytest.mark.slow
@settings(max_examples=12, derandomize=True, deadline=None)
@given(configs())
def test_causality_and_isolation_in_random_schedules(cfg):
  check_causality(cfg)
  check_isolation(cfg)


@fixed
def test_backends_and_unrolling_agree(cfg):
  batch = Batch.of(small.tokens(cfg, 2, LENGTH))
  plain = dataclasses.replace(cfg.train, backend="reference", scan_layers=False)
  graphdef, _ = abstract(dataclasses.replace(cfg, train=plain))
  got = small.compiled(graphdef, small.model(cfg)[1], batch, all_positions=True)
  close(np.asarray(got.logits_BxNxV), small.logits(cfg, batch), LOGIT_TOLERANCE)


@functools.cache
def captured(cfg):
  graphdef, state = small.model(cfg)
  batch = Batch.of(small.tokens(cfg, 2, LENGTH))
  whole = Call(capture=True)
  told = jax.jit(lambda s: nnx.merge(graphdef, s).hidden(batch, call=whole).aux)(state)
  return batch, told.trace


def test_selection_really_drops_entries_and_consumers_read_the_right_ones():
  cfg = FIXED[0]
  batch, traces = captured(cfg)
  for layer, spec in enumerate(cfg.model.layers):
    if not spec.is_sparse:
      continue
    rows = np.asarray(traces[layer]["ids"])
    np.testing.assert_array_equal(rows, traces[spec.index_source]["ids"])
    read, made = (traces[i]["entries"].rows.decode() for i in (layer, spec.kv_source))
    np.testing.assert_array_equal(read, made)
    lo, hi = (np.asarray(x) for x in batch.span(spec.ratio))
    assert ((hi - lo)[:, -1] > 4 * cfg.model.top_k).all(), "too few entries to test a selection"
    real = rows >= 0
    assert (rows[real] < np.broadcast_to(hi[..., None], rows.shape)[real]).all()
    np.testing.assert_array_equal(real.sum(-1), np.minimum(hi - lo, cfg.model.top_k))
  inside, free = traces[5]["ids"], traces[3]["ids"]
  assert (np.asarray(inside) != np.asarray(free)).any(), "the second selection chose nothing new"


def test_the_pool_limits_later_selections():
  cfg = small.config("full/1+candidates reindex", candidate_blocks=2)
  _, limited = captured(cfg)
  _, free = captured(small.config("full/1 reindex"))
  np.testing.assert_array_equal(limited[0]["ids"], free[0]["ids"])
  assert (np.asarray(limited[1]["ids"]) != np.asarray(free[1]["ids"])).any()
  blocks = np.asarray(limited[1]["ids"]) // cfg.model.candidate_block_size
  for row in blocks.reshape(-1, blocks.shape[-1]):
    assert len({b for b in row if b >= 0}) <= 2


@functools.cache
def gradients(cfg):
  """Gradients by name of (the language model's loss, the indexers' loss), from one program."""
  graphdef, state = small.model(cfg)
  params, buffers = nnx.split_state(state, nnx.Param, ...)
  arrays = small.arrays(Batch.of(small.tokens(cfg, 2, LENGTH)))

  def losses(params):
    _, told = loss_fn(graphdef, params, buffers, arrays, cfg)
    return told["ce"], told["indexer_kl"]

  pull = jax.jit(lambda params, weights: jax.vjp(losses, params)[1](weights)[0])
  one, none = jnp.ones(()), jnp.zeros(())
  return [
    {
      "/".join(map(str, path)): np.asarray(leaf[...])
      for path, leaf in nnx.to_flat_state(pull(params, weights))
    }
    for weights in ((one, none), (none, one))
  ]


@pytest.mark.parametrize(
  "schedule",
  [small.EVERY_MECHANISM, pytest.param("dense/2 reindex reuse", marks=pytest.mark.slow)],
)
def test_the_indexer_loss_reaches_every_indexer_and_nothing_else(schedule):
  cfg = small.config(schedule)
  of_language, of_indexer = gradients(cfg)
  trained = [name for name in of_language if "/indexer/" in name or "/index_keys/" in name]
  assert sum("indexer/wq_b" in name for name in trained) == len(cfg.model.layers.index_sources)
  for name in of_language:
    if name in trained:
      assert not of_language[name].any(), f"{name} is reached by the language model's loss"
      assert np.abs(of_indexer[name]).max() > 0, f"{name} gets no gradient"
    else:
      assert not of_indexer[name].any(), f"the indexer's loss leaks into {name}"


@pytest.mark.slow
def test_every_parameter_of_the_backbone_is_trained():
  of_language, _ = gradients(small.config())
  for name, gradient in of_language.items():
    if not ("/indexer/" in name or "/index_keys/" in name):
      assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, f"{name} gets no gradient"


def layer_aux(cfg, batch, **options):
  graphdef, state = small.model(cfg)
  return jax.jit(lambda s: nnx.merge(graphdef, s).hidden(batch, **options).aux)(state)


def test_prompt_tokens_use_fewer_experts():
  cfg = small.config("swa*2", experts_per_prompt_token=1)
  whole = Batch.of(small.tokens(cfg, 2, 16))
  is_prompt = jnp.broadcast_to(jnp.arange(16) < 9, (2, 16))
  prompt = dataclasses.replace(whole, is_prompt_BxS=is_prompt)
  told = layer_aux(cfg, prompt, call=Call(capture=True))
  for trace in told.trace:
    used = (np.asarray(trace["experts"]) >= 0).sum(-1)
    np.testing.assert_array_equal(used, np.where(is_prompt, 1, 2))
  np.testing.assert_array_equal(told.load_E.sum(-1), [2 * (9 + 7 * 2)] * 2)


def test_padding_reaches_no_routed_expert():
  cfg = small.config("swa")
  row = row_of(np.arange(20), np.arange(13), lengths=(28, 20))
  told = layer_aux(cfg, batch_of(row))
  assert float(told.load_E.sum()) == 33 * cfg.model.experts_per_token


def temporaries(length):
  cfg = small.config("full/1+candidates reindex", train={"remat": "layer"})
  graphdef, state = abstract(cfg)
  params, buffers = nnx.split_state(state, nnx.Param, ...)
  arrays = jax.eval_shape(lambda: small.arrays(Batch.of(jnp.zeros((1, length), jnp.int32))))
  gradient = jax.grad(lambda p, b, a: loss_fn(graphdef, p, b, a, cfg)[0])
  compiled = jax.jit(gradient).lower(params, buffers, arrays).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_training_memory_grows_with_the_length_and_not_with_its_square():
  assert temporaries(16384) < 4.6 * temporaries(4096)  # four times the tokens


def test_stacked_layers_publish_nothing():
  """So a scan over them cannot hide a new selection from the layers behind it."""
  for cfg in FIXED:
    for first, count in cfg.model.layers.runs():
      specs = cfg.model.layers.layers[first : first + count]
      assert count == 1 or not any(s.is_source or s.has_indexer or s.engram for s in specs)
      assert len({s.run_key for s in specs}) == 1
  released = schedule_lib.parse("swa*2 (full/2 reuse*5)*3 | full/1+candidates reuse*3")
  assert (3, 5) in released.runs()
