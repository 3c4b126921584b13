"""Triton kernels through Triton's interpreter: the launches that the backends make, on NumPy.

What they compile to is checked by `scripts/aot_check.py`.
"""

import dataclasses
import importlib.util
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_numpy
from comparing import close
from hysparse_kernels import compat, dispatch, triton_launch, tuning
from hysparse_kernels.catalogue import OPERATIONS, separated
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import QUANTISERS, Stored
from hysparse_kernels.indexer import specs as indexer_specs
from hysparse_kernels.indexer.scores import weighted
from hysparse_kernels.paged import Paged
from hysparse_kernels.sparse_attention import parts, sparse_attention
from hysparse_kernels.sparse_attention import specs as attention_specs

with triton_numpy.interpreted():
  triton = pytest.importorskip("triton", reason="Triton is made for Linux")
  import triton.language as tl
  from hysparse_kernels.formats.triton import load_halves, pair, round_to_bfloat16
  from hysparse_kernels.indexer import triton as indexer_triton
  from hysparse_kernels.sparse_attention import triton as attention_triton

  @triton.jit
  def copy_halves(
    codes_ptr, scales_ptr, rows_ptr, low_ptr, high_ptr,
    FORMAT: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
  ):  # fmt: skip
    at = tl.arange(0, COUNT)
    rows = tl.load(rows_ptr + at).to(tl.int64)
    low, high = load_halves(codes_ptr, scales_ptr, rows, rows >= 0, FORMAT, CHANNELS, WIDTH)
    places = at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(low_ptr + places, low)
    tl.store(high_ptr + places, high)

  @triton.jit
  def copy_rounded(x_ptr, rounded_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(rounded_ptr + at, round_to_bfloat16(tl.load(x_ptr + at)))


# Small, so that windows, selections and contexts of the specs have several blocks and parts.
ATTENTION_SIZES = {"heads": 16, "keys": 4, "programs": 128, "warps": 4, "stages": 1}
INDEXER_SIZES = {
  "queries": 16, "chunk": 128, "pool_queries": 4, "pool_ratio": 4,
  "keys": 32, "kernel_queries": 5, "warps": 4, "stages": 1,
}  # fmt: skip


def by_name(specs):
  return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.name)


def everyday(specs, *names):
  """With fewer queries, which the interpreter takes one by one; names: only these."""
  short = (dataclasses.replace(spec, queries=min(spec.queries, 9)) for spec in specs)
  return by_name([spec for spec in short if not names or spec.name in names])


def named(specs, name):
  return next(spec for spec in specs if spec.name == name)


def reference(name, arguments):
  arrays, rest = separated(arguments)
  return jax.jit(lambda arrays: OPERATIONS[name].call(arrays | rest, "reference"))(arrays)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
  """Launches go to the interpreter, with float32 in the place of bfloat16."""
  monkeypatch.setattr(triton_launch, "run", triton_numpy.run)
  with (
    compat.target("gpu", interpret=True),
    tuning.using("sparse_attention", "triton", ATTENTION_SIZES),
    tuning.using("indexer", "triton", INDEXER_SIZES),
  ):
    yield


def attend(arguments):
  """(out, lse) of what the backend launches."""
  launch = attention_triton.launch_of(*arguments.values())
  return parts.join(*triton_numpy.results(launch), arguments["q_BxSxHxC"].dtype)


def score(arguments, first, count, released_rounding=False):
  """[B, S, count] of what the backend launches."""
  arrays = (arguments[name] for name in ("q_BxSxIxD", "keys", "weights_BxSxI"))
  launch = indexer_triton.launch_of(*arrays, first, count, released_rounding, INDEXER_SIZES)
  return triton_numpy.results(launch)[0]


def scores(arguments, released_rounding=False):
  """[B, S, T] by definition."""

  @jax.jit
  def run(q, keys, weights):
    dots = einsum("bsid,btd->bsit", q, keys.values(q.dtype))
    return weighted(dots, weights, released_rounding)

  return run(*(arguments[name] for name in ("q_BxSxIxD", "keys", "weights_BxSxI")))


@everyday(attention_specs.SPECS)
def test_attention_equals_the_reference(spec):
  arguments = spec.arguments()
  want = reference("sparse_attention", arguments)
  for got, wanted in zip(attend(arguments), (want.out_BxSxHxC, want.lse_BxSxH), strict=True):
    close(got, wanted)


@everyday(indexer_specs.SPECS)
def test_scores_of_a_chunk_equal_their_definition(spec):
  """From the middle of a context to beyond its end."""
  arguments = spec.arguments()
  keys = arguments["keys"]
  first = keys.entries // 3
  want = scores(arguments)[..., first:]
  got = score(arguments, first, want.shape[-1] + 5)
  close(got[..., :-5], want)


def check_call(op, spec):
  arguments = spec.arguments()
  got = OPERATIONS[op].call(arguments, "triton")
  jax.tree.map(close, got, reference(op, arguments))


@everyday(attention_specs.SPECS, "chunk")
def test_a_call_of_attention_equals_the_reference(spec):
  check_call("sparse_attention", spec)


@everyday(indexer_specs.SPECS, "ties", "within", "within_much")
def test_a_call_of_the_indexer_equals_the_reference(spec):
  check_call("indexer", spec)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("op", "spec"),
  [
    pytest.param(op, spec, id=f"{op}-{spec.name}")
    for op in ("sparse_attention", "indexer")
    for spec in OPERATIONS[op].specs
  ],
)
def test_a_call_with_the_sizes_of_the_table_equals_the_reference(op, spec):
  sizes = tuning.table(op)["triton"]["rows"][-1]["sizes"]
  with tuning.using(op, "triton", sizes):
    check_call(op, spec)


@pytest.mark.parametrize("channels", [64, 40, 7])
@pytest.mark.parametrize("format", list(QUANTISERS))
def test_rows_decode_to_the_bit(format, channels):
  """Every scale, and every code; halves of whole blocks, of parts of blocks, of unequal size."""
  rng = np.random.default_rng(0)
  empty = jax.eval_shape(lambda: Stored.of(jnp.zeros((256, channels)), format))
  shapes = {name: part.shape for name, part in empty.parts.items()}
  codes = rng.integers(0, 256, shapes["codes"], np.uint8)
  if channels % 2 and format != "fp8":
    codes[:, -1] &= 15  # the half of a byte that holds no channel
  scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], shapes["scales"])
  rows = dataclasses.replace(empty, parts={"codes": codes, "scales": scales})
  order = rng.permutation(256).astype(np.int32)
  order[::7] = -1
  launch = triton_launch.Launch(
    kernel=copy_halves,
    arrays=(*pair(rows), order),
    results=(jax.ShapeDtypeStruct((256, 32), jnp.float32),) * 2,
    grid=(1,),
    constants={"FORMAT": format, "CHANNELS": channels, "COUNT": 256, "WIDTH": 32},
    warps=4,
    stages=1,
  )
  low, high = triton_numpy.results(launch)
  half = -(-channels // 2)
  got = np.concatenate([low[:, :half], high[:, : channels - half]], axis=1)
  want = np.where(order[:, None] >= 0, np.asarray(jax.jit(Stored.decode)(rows))[order], 0)
  normal = lambda x: np.where(np.abs(x) < 2.0**-126, 0, x)  # noqa: E731  XLA flushes the others
  np.testing.assert_array_equal(normal(got), normal(want))
  assert not np.nan_to_num(low[:, half:]).any()
  assert not np.nan_to_num(high[:, channels - half :]).any()


def test_rounding_to_bfloat16_is_to_nearest_ties_to_even_and_keeps_nan():
  bits = np.random.default_rng(0).integers(0, 2**32, 1024, np.uint32)
  bits[:6] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF
  x = bits.view(np.float32)
  launch = triton_launch.Launch(
    kernel=copy_rounded,
    arrays=(x,),
    results=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
    grid=(1,),
    constants={"COUNT": len(x)},
    warps=4,
    stages=1,
  )
  with np.errstate(invalid="ignore"):
    want = x.astype(jnp.bfloat16).astype(np.float32)
  np.testing.assert_array_equal(triton_numpy.results(launch)[0], want)


def test_rows_behind_2_to_the_31_bytes():
  """The pool is lazily mapped: what is not touched takes no memory."""
  spec = attention_specs.Spec("near", queries=2, channels=512, top_k=6, entries=9, main_kv="fp4")
  arguments = spec.arguments()
  view = arguments["view"]
  count = 2**23 + 9  # rows of 256 bytes
  far = np.append(np.arange(4), count - 1 - np.arange(5))

  def spread(part):
    pool = np.zeros((count, part.shape[-1]), np.uint8)
    pool[far] = part
    return pool

  rows = np.asarray(view.rows_BxSxK)
  assert (far[rows] >= 2**23).any()
  moved = dataclasses.replace(
    view, entries=jax.tree.map(spread, view.entries), rows_BxSxK=far[rows].astype(np.int32)
  )
  got = attend(arguments | {"view": moved})
  jax.tree.map(np.testing.assert_array_equal, got, attend(arguments))


def test_keys_behind_2_to_the_31_bytes():
  spec = indexer_specs.Spec("near", queries=3, before=61, dim=128, index_k="mxfp4", page=16)
  arguments = spec.arguments()
  keys = arguments["keys"]
  blocks = 2**21 + 4  # of 16 rows of 64 bytes
  last = blocks - 1 - np.arange(keys.rows.shape[0] // 16)

  def spread(part):
    pool = np.zeros((blocks, 16, part.shape[-1]), np.uint8)
    pool[last] = np.asarray(part).reshape(-1, 16, part.shape[-1])
    return pool.reshape(blocks * 16, -1)

  table = last[np.asarray(keys.table_BxJ)].astype(np.int32)
  moved = Paged(jax.tree.map(spread, keys.rows), table, 16)
  want = score(arguments, 0, keys.entries)
  np.testing.assert_array_equal(score(arguments | {"keys": moved}, 0, keys.entries), want)


@pytest.mark.parametrize("seen", ["window", "entries"])
def test_probabilities_are_rounded_where_keys_are_bfloat16(seen):
  """Relative to the largest score so far: of all, if all keys are in one block."""
  arguments = attention_specs.Spec("rounded", queries=6, heads=3, top_k=7).arguments()
  view = arguments["view"]
  keys = {
    name: Stored.plain(getattr(view, name).parts["values"].astype(jnp.bfloat16))
    for name in ("window", "entries")
  }
  hidden = {"window": "rows_BxSxK", "entries": "tags_BxP"}[seen]
  keys[hidden] = jnp.full_like(getattr(view, hidden), -1)
  arguments["view"] = dataclasses.replace(view, **keys)
  with tuning.using("sparse_attention", "triton", ATTENTION_SIZES | {"keys": 16, "programs": 1}):
    out, _ = attend(arguments)
  close(out, reference("sparse_attention", arguments).out_BxSxHxC)


def test_a_row_with_an_unexpected_tag_never_takes_part():
  arguments = attention_specs.Spec("stale", queries=1, before=20, top_k=0).arguments()
  view = arguments["view"]
  stale = view.tags_BxP.at[0, 17].add(-8)  # the row that stood in this ring slot a lap ago
  poison = Stored.plain(view.window.parts["values"].at[0, 17].set(1e4))

  def out(**changes):
    return attend(arguments | {"view": dataclasses.replace(view, **changes)})[0]

  np.testing.assert_array_equal(out(window=poison, tags_BxP=stale), out(tags_BxP=stale))
  assert (np.asarray(out(window=poison)) != np.asarray(out())).any()


@pytest.mark.parametrize("programs", [1, 128])
def test_queries_without_keys_and_sinks_above_all(programs):
  arguments = attention_specs.Spec("blind", queries=3, heads=4).arguments()
  arguments["positions_BxS"] = arguments["positions_BxS"].at[0, 1].set(-1)
  arguments["sink_H"] = jnp.float32([0.5, 200.0, 1e4, -1e4])
  with tuning.using("sparse_attention", "triton", ATTENTION_SIZES | {"programs": programs}):
    out, lse = attend(arguments)
  want = reference("sparse_attention", arguments)
  close(out, want.out_BxSxHxC)
  np.testing.assert_allclose(lse, want.lse_BxSxH, rtol=1e-6)
  assert not np.asarray(out)[0, 1].any() and not np.asarray(out)[0, :, 1:3].any()


def test_a_nan_reaches_those_that_select_it_and_nobody_else():
  arguments = attention_specs.Spec("shared", batch=2, queries=6, before=10, ratio=4).arguments()
  view = arguments["view"]
  entries = view.entries.parts["values"]
  poisoned = Stored.plain(entries.at[: len(entries) // 2].set(jnp.nan))  # all of sequence 0
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
    out, lse = attend(arguments | {"view": dataclasses.replace(view, entries=poisoned)})
  whole = attend(arguments)
  np.testing.assert_array_equal(out[1], whole[0][1])
  np.testing.assert_array_equal(lse[1], whole[1][1])
  assert np.isnan(out[0]).all()


@pytest.mark.parametrize("released_rounding", [False, True])
def test_a_nan_key_has_nan_scores(released_rounding):
  arguments = indexer_specs.Spec("nan", queries=6, before=30).arguments()
  keys = arguments["keys"].rows.parts["values"].at[3].set(jnp.nan)
  arguments["keys"] = Paged.contiguous(Stored.plain(keys[None]))
  got = score(arguments, 0, len(keys), released_rounding)
  assert np.isnan(got[..., 3]).all() and np.isfinite(np.delete(got, 3, -1)).all()


def test_scores_are_rounded_as_the_released_code_does():
  """Dots are exact here, so that no order of sums changes what is rounded."""
  arguments = indexer_specs.Spec("rounded", queries=9, before=40).arguments()
  rng = np.random.default_rng(0)
  exact = lambda x: jnp.asarray(rng.integers(-20, 21, x.shape) / 8, jnp.float32)  # noqa: E731
  for name in ("q_BxSxIxD", "keys", "weights_BxSxI"):
    arguments[name] = jax.tree.map(exact, arguments[name])
  want = scores(arguments, released_rounding=True)
  got = score(arguments, 0, want.shape[-1], released_rounding=True)
  np.testing.assert_array_equal(got, want)
  assert (got != score(arguments, 0, want.shape[-1])).any()


def test_gradients_are_those_of_the_xla_backend():
  arguments = attention_specs.Spec("gradient", queries=5, heads=3, window=4, ratio=2).arguments()
  view = arguments.pop("view")
  fixed = {"positions_BxS": arguments.pop("positions_BxS"), "scale": arguments.pop("scale")}
  rows = {name: getattr(view, name).parts["values"] for name in ("window", "entries")}

  def loss(floats, rows, backend):
    stored = {name: Stored.plain(values) for name, values in rows.items()}
    call = floats | fixed | {"view": dataclasses.replace(view, **stored)}
    result = sparse_attention(**call, backend=backend)
    return (jnp.sin(result.out_BxSxHxC).sum() + result.lse_BxSxH.sum()), result.mass_BxSxK

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
  got, want = (run(arguments, rows, backend) for backend in ("triton", "xla"))
  jax.tree.map(close, got, want)


def test_decoding_splits_the_keys_and_prefill_does_not():
  """With the sizes of the table and of the released model."""
  sizes = tuning.table("sparse_attention")["triton"]["rows"][0]["sizes"]
  names = ("released_decode", "released_prefill")
  grids = []
  with tuning.using("sparse_attention", "triton", sizes):
    for shapes in (named(attention_specs.RELEASED, name).shapes() for name in names):
      order = ("q_BxSxHxC", "positions_BxS", "view", "sink_H", "scale")
      grids.append(attention_triton.launch_of(*(shapes[name] for name in order)).grid)
  assert grids == [(8, 1, 16), (128, 1, 1)]


def test_it_says_why_it_cannot_run(monkeypatch):
  monkeypatch.undo()
  arguments = attention_specs.SPECS[0].arguments()
  monkeypatch.setitem(sys.modules, "jax_triton", None)
  with pytest.raises(dispatch.BackendError, match="jax-triton cannot be imported"):
    sparse_attention(**arguments, backend="triton")
  with (
    compat.target("cpu"),
    pytest.raises(dispatch.BackendError, match="'triton' runs on gpu, the platform is cpu"),
  ):
    sparse_attention(**arguments, backend="triton")


def test_auto_passes_over_a_backend_whose_packages_are_missing(monkeypatch, caplog):
  backend = triton_launch.lazy("indexer", "select")
  table = {"xla": "the portable one", "triton": backend}
  found = {"triton": True, "jax_triton": None}
  monkeypatch.setattr(importlib.util, "find_spec", found.get)
  assert dispatch.select("op_without_packages", "auto", table) == "the portable one"
  assert "'triton' needs jax_triton" in caplog.text
  found["jax_triton"] = True
  assert dispatch.select("op_with_packages", "auto", table) is backend
  with pytest.raises(dispatch.BackendError, match="nowhere cannot be imported"):
    dispatch.Lazy("hysparse_kernels.nowhere", "f", ())()
