"""The same as fused loops over wide axes, each with its own gradient.

M is tiny (4), so a batch of M x M products is a bad shape for a machine: the mix is written as
elementwise work over channels, Sinkhorn as elementwise work over tokens. Sums over streams are
written out term by term, so that one loop reads the streams once (a reduction would first store
the products). Left to autodiff, all this dominates a training step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels.hyper_connections.reference import composed

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def coefficients(
  x_NxMxD: jax.Array,
  fn_QxP: jax.Array,
  base_Q: jax.Array,
  scale_3: jax.Array,
  iters: int,
  eps: float,
  norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  N, M, _ = x_NxMxD.shape
  x_NxP = x_NxMxD.astype(jnp.float32).reshape(N, -1)
  scale_N = jax.lax.rsqrt(jnp.mean(x_NxP**2, axis=-1) + norm_eps)
  mixes_QxN = _einsum("qp,np->qn", fn_QxP, x_NxP) * scale_N
  scales_Q = scale_3[np.repeat([0, 1, 2], [M, M, M * M])]
  mixes_QxN = mixes_QxN * scales_Q[:, None] + base_Q[:, None]
  pre_MxN = jax.nn.sigmoid(mixes_QxN[:M]) + eps
  post_MxN = 2 * jax.nn.sigmoid(mixes_QxN[M : 2 * M])
  comb_MxMxN = sinkhorn(mixes_QxN[2 * M :].reshape(M, M, N), iters, eps)
  return pre_MxN.T, post_MxN.T, jnp.moveaxis(comb_MxMxN, -1, 0)


# --- Sinkhorn, tokens last -----------------------------------------------------------------------

ROWS, COLUMNS = 1, 0  # the axis that a row's or a column's sum runs over


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sinkhorn(logits_MxMxN: jax.Array, iters: int, eps: float) -> jax.Array:
  """Softmax over the second axis, then `iters` times columns, with rows in between."""
  return _sinkhorn_forward(logits_MxMxN, iters, eps)[0]


def _sinkhorn_forward(logits_MxMxN, iters, eps):
  soft_MxMxN = jax.nn.softmax(logits_MxMxN, axis=ROWS)

  def normalise(comb, axis):
    total = comb.sum(axis, keepdims=True) + eps
    return comb / total, total

  def both(comb, _):
    comb, rows = normalise(comb, ROWS)
    comb, columns = normalise(comb, COLUMNS)
    return comb, (rows, columns)

  comb_MxMxN, first = normalise(soft_MxMxN + eps, COLUMNS)
  comb_MxMxN, totals = jax.lax.scan(both, comb_MxMxN, length=iters - 1)
  return comb_MxMxN, (soft_MxMxN, comb_MxMxN, first, totals)


def _sinkhorn_backward(iters, eps, saved, dcomb_MxMxN):
  """Walks back through the divisions; each undoes itself by its total, so only totals are kept."""
  del iters, eps
  soft_MxMxN, comb_MxMxN, first, totals = saved

  def undo(comb, dcomb, total, axis):
    before = (dcomb - (dcomb * comb).sum(axis, keepdims=True)) / total
    return comb * total, before

  def both(carry, total):
    rows, columns = total
    comb, dcomb = undo(*carry, columns, COLUMNS)
    return undo(comb, dcomb, rows, ROWS), None

  carry, _ = jax.lax.scan(both, (comb_MxMxN, dcomb_MxMxN), totals, reverse=True)
  _, dsoft = undo(*carry, first, COLUMNS)
  dlogits = soft_MxMxN * (dsoft - (dsoft * soft_MxMxN).sum(ROWS, keepdims=True))
  return (dlogits,)


sinkhorn.defvjp(_sinkhorn_forward, _sinkhorn_backward)


# --- Fold and update ---------------------------------------------------------------------------


@jax.custom_vjp
def fold(x_NxMxD: jax.Array, pre_NxM: jax.Array) -> jax.Array:
  x = x_NxMxD.astype(jnp.float32)
  u_NxD = sum(pre_NxM[:, m, None] * x[:, m] for m in range(x.shape[1]))
  return u_NxD.astype(x_NxMxD.dtype)


def _fold_forward(x_NxMxD, pre_NxM):
  return fold(x_NxMxD, pre_NxM), (x_NxMxD, pre_NxM)


def fold_backward(
  saved: tuple[jax.Array, jax.Array], du_NxD: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Gradients of the arguments of `fold`, which are `saved`."""
  x_NxMxD, pre_NxM = saved
  du_NxD = du_NxD.astype(jnp.float32)
  dx_NxMxD = pre_NxM[..., None] * du_NxD[:, None]
  dpre_NxM = _einsum("nd,nmd->nm", du_NxD, x_NxMxD.astype(jnp.float32))
  return dx_NxMxD.astype(x_NxMxD.dtype), dpre_NxM.astype(pre_NxM.dtype)


fold.defvjp(_fold_forward, fold_backward)


@jax.custom_vjp
def update(
  x_NxMxD: jax.Array, y_NxD: jax.Array, post_NxM: jax.Array, comb_NxMxM: jax.Array
) -> jax.Array:
  x, y = x_NxMxD.astype(jnp.float32), y_NxD.astype(jnp.float32)
  mixed_NxMxD = sum(comb_NxMxM[:, i, :, None] * x[:, i, None] for i in range(x.shape[1]))
  return (mixed_NxMxD + post_NxM[..., None] * y[:, None]).astype(x_NxMxD.dtype)


def _update_forward(*inputs):
  return update(*inputs), inputs


def update_backward(inputs: tuple[jax.Array, ...], dout_NxMxD: jax.Array) -> tuple[jax.Array, ...]:
  """Gradients of the arguments of `update`, which are `inputs`."""
  x, y, post_NxM, comb_NxMxM, dout = (a.astype(jnp.float32) for a in (*inputs, dout_NxMxD))
  streams = range(x.shape[1])
  gradients = (
    sum(comb_NxMxM[:, :, j, None] * dout[:, None, j] for j in streams),
    sum(post_NxM[:, j, None] * dout[:, j] for j in streams),
    _einsum("nd,njd->nj", y, dout),
    _einsum("nid,njd->nij", x, dout),
  )
  return tuple(g.astype(a.dtype) for g, a in zip(gradients, inputs, strict=True))


update.defvjp(_update_forward, update_backward)


advance = composed(update, coefficients, fold)
