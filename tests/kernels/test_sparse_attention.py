"""Sparse attention: backends against the plain definition, and the rules of a View."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels.sparse_attention import View, sparse_attention
from hysparse_kernels.sparse_attention.specs import SPECS, Spec

# Sums of a few dozen float32 products in another order.
FORWARD_TOLERANCE = 2e-6
# The same through two products and a cancelling difference (dp - pull).
GRADIENT_TOLERANCE = 2e-5

by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def close(a, b, tolerance):
  scale = max(1.0, float(jnp.abs(b).max()))
  np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


@by_name
def test_xla_equals_the_reference(spec):
  arguments = spec.arguments()
  got, want = (sparse_attention(**arguments, backend=b) for b in ("xla", "reference"))
  close(got.out_BxSxHxC, want.out_BxSxHxC, FORWARD_TOLERANCE)
  close(got.lse_BxSxH, want.lse_BxSxH, FORWARD_TOLERANCE)
  if spec.top_k:
    close(got.mass_BxSxK, want.mass_BxSxK, FORWARD_TOLERANCE)


@by_name
def test_gradients_equal_autodiff_of_the_reference(spec):
  arguments = spec.arguments()
  rng = np.random.default_rng(1)
  shape = arguments["q_BxSxHxC"].shape
  d_out, d_lse = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, shape[:3]))

  def loss(floats, backend):
    q, window, entries, sink = floats
    view = dataclasses.replace(arguments["view"], window_BxPxC=window, entries_BxTxC=entries)
    result = sparse_attention(
      q, arguments["positions_BxS"], view, sink, scale=arguments["scale"], backend=backend
    )
    return (result.out_BxSxHxC * d_out).sum() + (result.lse_BxSxH * d_lse).sum()

  view = arguments["view"]
  floats = (arguments["q_BxSxHxC"], view.window_BxPxC, view.entries_BxTxC, arguments["sink_H"])
  got, want = (jax.grad(loss)(floats, b) for b in ("xla", "reference"))
  jax.tree.map(lambda a, b: close(a, b, GRADIENT_TOLERANCE), got, want)
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(want))


def test_the_reference_equals_float64_numpy():
  spec = Spec("oracle", batch=2, queries=30, heads=3, window=4, ratio=2, top_k=5, documents=2)
  arguments = spec.arguments()
  result = sparse_attention(**arguments, backend="reference")
  q, positions, view, sink = (
    jax.tree.map(np.asarray, arguments[n]) for n in ("q_BxSxHxC", "positions_BxS", "view", "sink_H")
  )
  for b, s, h in np.ndindex(q.shape[:3]):
    first = max(s - spec.window + 1, s - positions[b, s])
    keys = list(view.window_BxPxC[b, first : s + 1])
    keys += [view.entries_BxTxC[b, row] for row in view.rows_BxSxK[b, s] if row >= 0]
    keys = np.stack(keys).astype(np.float64)
    weights = np.exp(keys @ q[b, s, h] * arguments["scale"])
    want = weights @ keys / (weights.sum() + np.exp(float(sink[h])))
    np.testing.assert_allclose(result.out_BxSxHxC[b, s, h], want, atol=FORWARD_TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_row_with_an_unexpected_tag_never_takes_part(backend):
  arguments = Spec("stale", queries=1, before=20, window=8, top_k=0).arguments()
  view = arguments["view"]

  def out(window, tags):
    changed = dataclasses.replace(view, window_BxPxC=window, tags_BxP=tags)
    return sparse_attention(**(arguments | {"view": changed}), backend=backend).out_BxSxHxC

  stale = view.tags_BxP.at[0, 17].add(-8)  # the row that stood in this ring slot a lap ago
  poison = view.window_BxPxC.at[0, 17].set(1e4)
  np.testing.assert_array_equal(out(poison, stale), out(view.window_BxPxC, stale))
  assert (out(poison, view.tags_BxP) != out(view.window_BxPxC, view.tags_BxP)).any()


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_query_without_keys_gives_zeros(backend):
  arguments = Spec("blind", queries=6).arguments()
  arguments["positions_BxS"] = jnp.full_like(arguments["positions_BxS"], -1)
  result = sparse_attention(**arguments, backend=backend)
  assert not np.asarray(result.out_BxSxHxC).any()
  lse = np.broadcast_to(arguments["sink_H"], result.lse_BxSxH.shape)
  np.testing.assert_allclose(result.lse_BxSxH, lse, atol=FORWARD_TOLERANCE)


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
      jnp.zeros((1, S, C)),
      jnp.zeros((1, S), jnp.int32),
      jnp.zeros((1, S, C)),
      jnp.zeros((1, S, spec.top_k), jnp.int32),
      spec.window,
    )
    return jnp.zeros((1, S, spec.heads, C)), jnp.zeros((1, S), jnp.int32), view, jnp.zeros(4)

  small, large = temporaries(4096), temporaries(16384)
  assert large < 4.5 * small  # four times the tokens; the square would be sixteen
