"""The plain definitions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# The coefficients and the mix are float32 on every platform, also where dots are shortened.
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
  mixes_NxQ = _einsum("np,qp->nq", x_NxP, fn_QxP)
  mixes_NxQ *= jax.lax.rsqrt(jnp.mean(x_NxP**2, axis=-1, keepdims=True) + norm_eps)
  mix = lambda i, start, stop: mixes_NxQ[:, start:stop] * scale_3[i] + base_Q[start:stop]  # noqa: E731
  pre_NxM = jax.nn.sigmoid(mix(0, 0, M)) + eps
  post_NxM = 2 * jax.nn.sigmoid(mix(1, M, 2 * M))
  comb_NxMxM = sinkhorn(mix(2, 2 * M, (2 + M) * M).reshape(N, M, M), iters, eps)
  return pre_NxM, post_NxM, comb_NxMxM


def sinkhorn(logits_NxMxM: jax.Array, iters: int, eps: float) -> jax.Array:
  comb = jax.nn.softmax(logits_NxMxM, axis=-1) + eps
  comb = comb / (comb.sum(-2, keepdims=True) + eps)
  for _ in range(iters - 1):
    comb = comb / (comb.sum(-1, keepdims=True) + eps)
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
  return comb


def fold(x_NxMxD: jax.Array, pre_NxM: jax.Array) -> jax.Array:
  u_NxD = _einsum("nm,nmd->nd", pre_NxM, x_NxMxD.astype(jnp.float32))
  return u_NxD.astype(x_NxMxD.dtype)


def update(
  x_NxMxD: jax.Array, y_NxD: jax.Array, post_NxM: jax.Array, comb_NxMxM: jax.Array
) -> jax.Array:
  mixed_NxMxD = _einsum("nij,nid->njd", comb_NxMxM, x_NxMxD.astype(jnp.float32))
  added_NxMxD = post_NxM[..., None] * y_NxD.astype(jnp.float32)[:, None]
  return (mixed_NxMxD + added_NxMxD).astype(x_NxMxD.dtype)


def composed(update: Callable, coefficients: Callable, fold: Callable) -> Callable:
  """`advance` as the three operations of a backend, one after the other."""

  def advance(x_NxMxD, y_NxD, post_NxM, comb_NxMxM, pre_NxM, *mixing):
    x_NxMxD = update(x_NxMxD, y_NxD, post_NxM, comb_NxMxM)
    return x_NxMxD, fold(x_NxMxD, pre_NxM), coefficients(x_NxMxD, *mixing)

  return advance


advance = composed(update, coefficients, fold)
