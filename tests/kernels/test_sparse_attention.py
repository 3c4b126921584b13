"""Sparse attention: backends against the plain definition, and the rules of a View."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels import compat
from hysparse_kernels.dispatch import BackendError
from hysparse_kernels.formats import Stored, fake_quant
from hysparse_kernels.sparse_attention import View, sparse_attention
from hysparse_kernels.sparse_attention.specs import SPECS, Spec

# Sums of a few dozen float32 products in another order.
FORWARD_TOLERANCE = 2e-6
# One rounding of the result more or less.
BFLOAT16_TOLERANCE = 2**-7
# The same through two products and a cancelling difference (dp - pull).
GRADIENT_TOLERANCE = 2e-5

compiled = jax.jit(sparse_attention, static_argnames=("scale", "backend"))


def attend(backend="xla", **arguments):
  with running(backend):
    return compiled(**arguments, backend=backend)


def running(backend):
  """Where functions that call this backend can be traced."""
  if backend == "pallas_tpu":
    return compat.target("tpu", interpret=True)
  return contextlib.nullcontext()


def values(rows):
  """Of plain rows; None for none."""
  return None if rows is None else rows.parts["values"]


def plain(x):
  return None if x is None else Stored.plain(x)


# Quantising takes long to compile: packed specs have a test of their own every day.
by_name = pytest.mark.parametrize(
  "spec",
  [pytest.param(s, marks=[] if s.main_kv == "f32" else pytest.mark.slow) for s in SPECS],
  ids=lambda spec: spec.name,
)


with_kernel = pytest.mark.parametrize(
  "backend", ["reference", "xla", pytest.param("pallas_tpu", marks=pytest.mark.slow)]
)


def close(a, b, tolerance):
  a, b = np.asarray(a), np.asarray(b)
  if b.dtype == jnp.bfloat16:
    a, b, tolerance = np.float32(a), np.float32(b), BFLOAT16_TOLERANCE
  scale = max(1.0, float(np.abs(b).max()))
  np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


@by_name
def test_xla_equals_the_reference(spec):
  arguments = spec.arguments()
  got, want = (attend(**arguments, backend=b) for b in ("xla", "reference"))
  close(got.out_BxSxHxC, want.out_BxSxHxC, FORWARD_TOLERANCE)
  close(got.lse_BxSxH, want.lse_BxSxH, FORWARD_TOLERANCE)
  if spec.top_k:
    close(got.mass_BxSxK, want.mass_BxSxK, FORWARD_TOLERANCE)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
def test_packed_rows_equal_fake_quantised_ones(backend):
  for spec in (spec for spec in SPECS if spec.main_kv in ("fp4", "mxfp4")):
    packed = spec.arguments()
    plain = dataclasses.replace(spec, main_kv="f32", window_kv="f32").arguments()
    view = plain["view"]
    fake = dataclasses.replace(
      view,
      window=Stored.plain(fake_quant(values(view.window), spec.window_kv)),
      entries=Stored.plain(fake_quant(values(view.entries), spec.main_kv)),
    )
    got, want = (attend(**(packed | {"view": v}), backend=backend) for v in (packed["view"], fake))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    unrounded = attend(**plain, backend=backend).out_BxSxHxC
    assert (np.asarray(unrounded) != np.asarray(want.out_BxSxHxC)).any()


@pytest.mark.parametrize(
  "spec", [s for s in SPECS if s.main_kv == "f32"], ids=lambda spec: spec.name
)
def test_gradients_equal_autodiff_of_the_reference(spec):
  check_gradients(spec, "xla")


def test_gradients_of_a_kernel_equal_those_of_the_reference():
  check_gradients(Spec("kernel", batch=2, queries=9, documents=2), "pallas_tpu")


def check_gradients(spec, backend):
  arguments = spec.arguments()
  rng = np.random.default_rng(1)
  shape = arguments["q_BxSxHxC"].shape
  d_out, d_lse = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, shape[:3]))

  def loss(floats, backend):
    q, window, entries, sink = floats
    view = dataclasses.replace(arguments["view"], window=plain(window), entries=plain(entries))
    result = sparse_attention(
      q, arguments["positions_BxS"], view, sink, scale=arguments["scale"], backend=backend
    )
    return (result.out_BxSxHxC * d_out).sum() + (result.lse_BxSxH * d_lse).sum()

  view = arguments["view"]
  floats = (arguments["q_BxSxHxC"], values(view.window), values(view.entries), arguments["sink_H"])
  step = jax.jit(jax.grad(loss), static_argnums=1)
  with running(backend):
    got = step(floats, backend)
  want = step(floats, "reference")
  jax.tree.map(lambda a, b: close(a, b, GRADIENT_TOLERANCE), got, want)
  reached = jax.tree.map(lambda x: np.abs(x).max() > 0, want)
  assert reached == (True, True, None if not spec.top_k else not spec.nothing_selected, True)


def test_gradients_reach_queries_past_a_packed_window():
  packed = Spec("packed_window", queries=6, window=4, top_k=0, window_kv="fp8").arguments()
  window = packed["view"].window.decode()

  def loss(q, rows):
    view = dataclasses.replace(packed["view"], window=rows)
    return (sparse_attention(**(packed | {"q_BxSxHxC": q, "view": view})).out_BxSxHxC ** 2).sum()

  step = jax.jit(jax.grad(loss))
  got, want = (step(packed["q_BxSxHxC"], w) for w in (packed["view"].window, Stored.plain(window)))
  np.testing.assert_array_equal(got, want)
  assert np.asarray(got).any()


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_gradients_reach_queries_past_packed_entries(backend):
  packed = Spec("packed_entries", queries=6, window=4, top_k=3, main_kv="fp4").arguments()
  entries = packed["view"].entries
  assert entries.format == "fp4"

  def loss(q, entries):
    view = dataclasses.replace(packed["view"], entries=entries)
    call = packed | {"q_BxSxHxC": q, "view": view}
    return (sparse_attention(**call, backend=backend).out_BxSxHxC ** 2).sum()

  step = jax.jit(jax.grad(loss))
  got, want = (step(packed["q_BxSxHxC"], e) for e in (entries, Stored.plain(entries.decode())))
  np.testing.assert_allclose(got, want, atol=FORWARD_TOLERANCE)
  assert np.asarray(got).any()


@pytest.mark.parametrize("queries", [1, 6])
def test_probabilities_are_rounded_for_the_keys_of_their_own_part(queries):
  """A window and entries of two dtypes: every backend rounds as far as each part's keys are."""
  arguments = Spec("two_dtypes", queries=queries, window=4, top_k=3).arguments()
  view = arguments["view"]
  narrow = Stored.plain(view.entries.decode().astype(jnp.bfloat16))
  mixed = arguments | {"view": dataclasses.replace(view, entries=narrow)}
  got, want = (attend(**mixed, backend=backend).out_BxSxHxC for backend in ("xla", "reference"))
  np.testing.assert_allclose(got, want, atol=FORWARD_TOLERANCE)
  wide = dataclasses.replace(view, entries=Stored.plain(narrow.decode()))
  unrounded = attend(**(arguments | {"view": wide}), backend="reference").out_BxSxHxC
  assert np.abs(want - unrounded).max() > 10 * FORWARD_TOLERANCE, "nothing was rounded"


def test_the_reference_equals_float64_numpy():
  spec = Spec("oracle", batch=2, queries=30, heads=3, window=4, ratio=2, top_k=5, documents=2)
  arguments = spec.arguments()
  result = attend(**arguments, backend="reference")
  q, positions, view, sink = (
    jax.tree.map(np.asarray, arguments[n]) for n in ("q_BxSxHxC", "positions_BxS", "view", "sink_H")
  )
  for b, s, h in np.ndindex(q.shape[:3]):
    first = max(s - spec.window + 1, s - positions[b, s])
    keys = list(values(view.window)[b, first : s + 1])
    keys += [values(view.entries)[row] for row in view.rows_BxSxK[b, s] if row >= 0]
    keys = np.stack(keys).astype(np.float64)
    weights = np.exp(keys @ q[b, s, h] * arguments["scale"])
    want = weights @ keys / (weights.sum() + np.exp(float(sink[h])))
    np.testing.assert_allclose(result.out_BxSxHxC[b, s, h], want, atol=FORWARD_TOLERANCE)


@with_kernel
def test_a_row_with_an_unexpected_tag_never_takes_part(backend):
  arguments = Spec("stale", queries=1, before=20, window=8, top_k=0).arguments()
  view = arguments["view"]

  def out(window, tags):
    changed = dataclasses.replace(view, window=plain(window), tags_BxP=tags)
    return attend(**(arguments | {"view": changed}), backend=backend).out_BxSxHxC

  stale = view.tags_BxP.at[0, 17].add(-8)  # the row that stood in this ring slot a lap ago
  window = values(view.window)
  poison = window.at[0, 17].set(1e4)
  np.testing.assert_array_equal(out(poison, stale), out(window, stale))
  assert (out(poison, view.tags_BxP) != out(window, view.tags_BxP)).any()


@pytest.mark.parametrize("before", [2, 7, 20])  # less than a window, all of one, more
def test_one_query_sees_what_its_tags_say(before):
  arguments = Spec("decode", batch=2, queries=1, before=before, window=8, top_k=4).arguments()
  view = arguments["view"]
  tags = view.tags_BxP.at[0, -2].add(-8).at[1, 0].set(-1)
  arguments["view"] = dataclasses.replace(view, tags_BxP=tags)
  got, want = (attend(**arguments, backend=b) for b in ("xla", "reference"))
  close(got.out_BxSxHxC, want.out_BxSxHxC, FORWARD_TOLERANCE)
  close(got.lse_BxSxH, want.lse_BxSxH, FORWARD_TOLERANCE)
  close(got.mass_BxSxK, want.mass_BxSxK, FORWARD_TOLERANCE)


@with_kernel
def test_a_query_without_keys_gives_zeros(backend):
  arguments = Spec("blind", queries=6).arguments()
  arguments["positions_BxS"] = jnp.full_like(arguments["positions_BxS"], -1)
  result = attend(**arguments, backend=backend)
  assert not np.asarray(result.out_BxSxHxC).any()
  lse = np.broadcast_to(arguments["sink_H"], result.lse_BxSxH.shape)
  np.testing.assert_allclose(result.lse_BxSxH, lse, atol=FORWARD_TOLERANCE)


def in_bfloat16(arguments):
  """Keys in bfloat16; the queries stay float32, so that the result shows what was rounded."""
  view = arguments["view"]
  keys = {n: plain(values(getattr(view, n)).astype(jnp.bfloat16)) for n in ("window", "entries")}
  return arguments | {"view": dataclasses.replace(view, **keys)}


@with_kernel
def test_probabilities_are_rounded_for_the_product_alone(backend):
  """Relative to the largest score of the keys; the denominator sums them unrounded."""
  spec = Spec("rounded", queries=12, heads=3, window=4, top_k=5)
  arguments = in_bfloat16(spec.arguments())
  got = attend(**arguments, backend=backend)
  q, view, sink = (np.asarray(arguments["q_BxSxHxC"]), arguments["view"], arguments["sink_H"])
  window, entries = (np.float64(values(x)) for x in (view.window, view.entries))
  window = window[0]
  bf16 = lambda x: x.astype(jnp.bfloat16).astype(np.float64)  # noqa: E731
  others = np.zeros(3)
  for s, h in np.ndindex(q.shape[1:3]):
    rows = [row for row in np.asarray(view.rows_BxSxK)[0, s] if row >= 0]
    keys = np.concatenate([window[max(0, s - 3) : s + 1], entries[rows]])
    scores = keys @ q[0, s, h] * arguments["scale"]
    p, sunk = np.exp(scores - scores.max()), np.exp(float(sink[h]) - scores.max())
    total = p.sum() + sunk
    want = bf16(p) @ keys / total
    close(got.out_BxSxHxC[0, s, h], want, FORWARD_TOLERANCE)
    close(got.lse_BxSxH[0, s, h], scores.max() + np.log(total), FORWARD_TOLERANCE)
    with_sink = max(scores.max(), float(sink[h]))
    for i, other in enumerate((
      p @ keys / total,
      bf16(p) @ keys / (bf16(p).sum() + sunk),
      bf16(np.exp(scores - with_sink)) @ keys / np.exp(scores.max() - with_sink) / total,
    )):  # fmt: skip
      others[i] = max(others[i], np.abs(other - want).max())
  assert (others > 100 * FORWARD_TOLERANCE).all(), "the roundings cannot be told apart"


def test_gradients_pass_straight_through_the_rounding():
  arguments = in_bfloat16(Spec("rounded", queries=12, heads=3, window=4, top_k=5).arguments())
  d_out = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 3, 16)), jnp.float32)

  def loss(floats, backend):
    result = sparse_attention(**(arguments | floats), backend=backend)
    return (result.out_BxSxHxC * d_out).sum()

  floats = {"q_BxSxHxC": arguments["q_BxSxHxC"], "sink_H": arguments["sink_H"]}
  got, want = (jax.jit(jax.grad(loss), static_argnums=1)(floats, b) for b in ("xla", "reference"))
  for name in floats:
    close(got[name], want[name], GRADIENT_TOLERANCE)
    assert np.abs(want[name]).max() > 0


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sink_above_every_score_takes_all(backend, dtype):
  """exp(sink - largest score) is no float32 number, and neither is its inverse."""
  arguments = Spec("sunk", queries=6, heads=3).arguments()
  arguments["sink_H"] = jnp.float32([200.0, 1e4, -1e4])
  if dtype == jnp.bfloat16:
    arguments = in_bfloat16(arguments)
  run = lambda a: attend(**a, backend=backend)  # noqa: E731
  result = run(arguments)
  without = run(arguments | {"sink_H": jnp.full(3, -jnp.inf)})
  out, lse = result.out_BxSxHxC, result.lse_BxSxH
  np.testing.assert_array_equal(out[:, :, :2], 0)
  np.testing.assert_allclose(lse[:, :, :2], np.broadcast_to([200.0, 1e4], lse[:, :, :2].shape))
  np.testing.assert_array_equal(out[:, :, 2], without.out_BxSxHxC[:, :, 2])
  loss = lambda sink: sparse_attention(  # noqa: E731
    **(arguments | {"sink_H": sink}), backend=backend
  ).out_BxSxHxC.sum()
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(arguments["sink_H"]), 0)


def test_memory_grows_with_the_selection_and_not_with_the_square():
  def temporaries(queries):
    spec = Spec("memory", queries=queries, heads=4, channels=32, window=16, top_k=16)
    shapes = jax.eval_shape(lambda: zeros(spec))

    def loss(q, positions, view, sink):
      return sparse_attention(q, positions, view, sink, scale=1.0, backend="xla").out_BxSxHxC.sum()

    step = jax.jit(jax.grad(loss)).lower(*shapes).compile()
    return step.memory_analysis().temp_size_in_bytes

  def zeros(spec):
    S, C = spec.queries, spec.channels
    view = View(
      plain(jnp.zeros((1, S, C))),
      jnp.zeros((1, S), jnp.int32),
      plain(jnp.zeros((S, C))),
      jnp.zeros((1, S, spec.top_k), jnp.int32),
      spec.window,
    )
    return jnp.zeros((1, S, spec.heads, C)), jnp.zeros((1, S), jnp.int32), view, jnp.zeros(4)

  small, large = temporaries(4096), temporaries(16384)
  assert large < 4.5 * small  # four times the tokens; the square would be sixteen


@with_kernel
def test_a_nan_that_nobody_selects_reaches_nobody(backend):
  """Places without an entry read some row of the pool, which belongs to another sequence."""
  spec = Spec("shared_pool", batch=2, queries=6, before=10, window=4, ratio=4, top_k=5)
  arguments = spec.arguments()
  view = arguments["view"]
  assert (np.asarray(view.rows_BxSxK)[1] == -1).any()
  entries, window = values(view.entries), values(view.window)
  empty = view.tags_BxP.at[1, :7].set(-1)
  whole = attend(**(arguments | {"view": dataclasses.replace(view, tags_BxP=empty)}))
  poisoned = dataclasses.replace(
    view,
    entries=Stored.of(entries.at[: len(entries) // 2].set(jnp.nan), "f32"),  # all of sequence 0
    window=Stored.of(window.at[1, :7].set(jnp.nan), "f32"),
    tags_BxP=empty,
  )
  got = attend(**(arguments | {"view": poisoned}), backend=backend)
  close(got.out_BxSxHxC[1], whole.out_BxSxHxC[1], FORWARD_TOLERANCE)
  assert np.isnan(got.out_BxSxHxC[0]).any()


def test_a_pool_beyond_the_addresses_of_a_tpu_is_refused():
  spec = Spec("huge", queries=1, channels=512, entries=2**26 + 1, main_kv="fp8")
  arguments = spec.shapes()
  scale = arguments.pop("scale")
  run = lambda arguments: sparse_attention(**arguments, scale=scale, backend="pallas_tpu")  # noqa: E731
  with running("pallas_tpu"), pytest.raises(BackendError, match="addresses 16 GiB of a pool"):
    jax.eval_shape(run, arguments)
