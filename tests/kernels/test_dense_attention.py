"""Dense attention: backends against the plain definition, merging, and the oracle selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels.dense_attention import dense_attention, merge, oracle_top_k
from hysparse_kernels.dense_attention.specs import SPECS
from hysparse_kernels.sparse_attention import sparse_attention
from hysparse_kernels.sparse_attention.specs import Spec as SparseSpec

# Running softmax against all at once: float32 sums of some hundred terms in another order.
FORWARD_TOLERANCE = 3e-6
GRADIENT_TOLERANCE = 2e-5

by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def close(a, b, tolerance):
  finite = np.isfinite(b)
  np.testing.assert_array_equal(np.isfinite(a), finite)
  np.testing.assert_allclose(np.asarray(a)[finite], np.asarray(b)[finite], atol=tolerance, rtol=0)


@by_name
def test_xla_equals_the_reference_with_gradients(spec):
  arguments = spec.arguments()
  rng = np.random.default_rng(1)
  shape = arguments["q_BxSxHxC"].shape
  d_out, d_lse = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, shape[:3]))

  def loss(qkv, backend):
    q, k, v = qkv
    rest = {n: arguments[n] for n in ("lo_BxS", "hi_BxS", "scale")}
    result = dense_attention(q, k, v, **rest, backend=backend)
    lse = jnp.where(jnp.isfinite(result.lse_BxSxH), result.lse_BxSxH, 0.0)
    return (result.out_BxSxHxC * d_out).sum() + (lse * d_lse).sum(), result

  qkv = tuple(arguments[n] for n in ("q_BxSxHxC", "k_BxTxGxC", "v_BxTxGxC"))
  compiled = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)  # far faster than op by op
  both = [compiled(qkv, b) for b in ("xla", "reference")]
  (got, got_result), (want, want_result) = both
  close(got_result.out_BxSxHxC, want_result.out_BxSxHxC, FORWARD_TOLERANCE)
  close(got_result.lse_BxSxH, want_result.lse_BxSxH, FORWARD_TOLERANCE)
  for a, b in zip(got, want, strict=True):
    close(a, b, GRADIENT_TOLERANCE * max(1.0, float(jnp.abs(b).max())))


@by_name
@pytest.mark.parametrize("reduce", ["max", pytest.param("sum", marks=pytest.mark.slow)])
def test_the_oracle_selects_by_attention_mass(spec, reduce):
  arguments = spec.arguments()
  lse = dense_attention(**arguments).lse_BxSxH
  arguments.pop("v_BxTxGxC")
  rows = [
    np.asarray(oracle_top_k(**arguments, lse_BxSxH=lse, top_k=5, reduce=reduce, backend=b))
    for b in ("xla", "reference")
  ]
  np.testing.assert_array_equal(*rows)
  q, k = (np.asarray(arguments[n], np.float64) for n in ("q_BxSxHxC", "k_BxTxGxC"))
  k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
  for b, s in np.ndindex(q.shape[:2]):
    lo, hi = int(arguments["lo_BxS"][b, s]), int(arguments["hi_BxS"][b, s])
    if hi == lo:
      assert (rows[0][b, s] == -1).all()
      continue
    scores = np.einsum("hc,thc->ht", q[b, s], k[b, lo:hi]) * arguments["scale"]
    probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    best = lo + np.argsort(-getattr(probs, reduce)(0), kind="stable")[:5]
    assert set(rows[0][b, s][rows[0][b, s] >= 0]) == set(best)


def test_a_merge_of_window_and_entries_is_one_softmax():
  """A dense layer over all entries equals sparse attention that selects every visible one."""
  spec = SparseSpec("merge", batch=2, queries=24, ratio=2, top_k=12, window=6)
  arguments = spec.arguments()
  view = arguments["view"]
  want = sparse_attention(**arguments)  # top_k = all 12 entries
  rest = {n: arguments[n] for n in ("q_BxSxHxC", "positions_BxS", "sink_H", "scale")}
  window = sparse_attention(view=type(view)(view.window, view.tags_BxP, width=6), **rest)
  hi = (arguments["positions_BxS"] + 1) // 2
  entries = view.entries.decode().reshape(2, 12, 1, -1)
  dense = dense_attention(
    arguments["q_BxSxHxC"], entries, entries, jnp.zeros_like(hi), hi, scale=arguments["scale"]
  )
  got = merge(window, dense)
  close(got.out_BxSxHxC, want.out_BxSxHxC, FORWARD_TOLERANCE)
  close(got.lse_BxSxH, want.lse_BxSxH, FORWARD_TOLERANCE)


def test_memory_grows_with_the_length_and_not_with_the_square():
  def temporaries(length):
    shapes = jax.eval_shape(lambda: zeros(length))
    loss = lambda a: dense_attention(**a, scale=1.0, backend="xla").out_BxSxHxC.sum()  # noqa: E731
    step = jax.jit(jax.grad(loss, allow_int=True)).lower(shapes).compile()
    return step.memory_analysis().temp_size_in_bytes

  def zeros(n):
    floats = {"q_BxSxHxC": jnp.zeros((1, n, 4, 16)), "k_BxTxGxC": jnp.zeros((1, n, 1, 16))}
    floats["v_BxTxGxC"] = floats["k_BxTxGxC"]
    return floats | {name: jnp.zeros((1, n), jnp.int32) for name in ("lo_BxS", "hi_BxS")}

  assert temporaries(16384) < 4.5 * temporaries(4096)
