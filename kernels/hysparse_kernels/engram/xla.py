"""The gate with its own gradient: only the inputs and one number per stream are kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from hysparse_kernels.engram.reference import DOT_FLOOR


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def gate(
  x_NxMxD: jax.Array,
  key_NxMxD: jax.Array,
  value_NxD: jax.Array,
  q_weight_MxD: jax.Array,
  k_weight_MxD: jax.Array,
  dead_N: jax.Array,
  eps: float,
) -> jax.Array:
  return _forward(x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD, dead_N, eps)[0]


def _forward(x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD, dead_N, eps):
  inputs = (x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD)
  x, key, value, q_weight, k_weight = (a.astype(jnp.float32) for a in inputs)
  x_scale_NxM = jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
  key_scale_NxM = jax.lax.rsqrt(jnp.mean(key * key, axis=-1) + eps)
  dot_NxM = jnp.sum(x * key * (q_weight * k_weight), axis=-1)
  dot_NxM *= x_scale_NxM * key_scale_NxM * x.shape[-1] ** -0.5
  root_NxM = jnp.sqrt(jnp.maximum(jnp.abs(dot_NxM), DOT_FLOOR))
  gate_NxM = jax.nn.sigmoid(jnp.where(jnp.signbit(dot_NxM), -root_NxM, root_NxM))
  gate_NxM = jnp.where(dead_N[:, None], 0, gate_NxM)
  y_NxMxD = (x + gate_NxM[..., None] * value[:, None]).astype(x_NxMxD.dtype)
  return y_NxMxD, (inputs, x_scale_NxM, key_scale_NxM, dot_NxM, gate_NxM)


def _backward(eps, saved, dy_NxMxD):
  del eps
  inputs, x_scale_NxM, key_scale_NxM, dot_NxM, gate_NxM = saved
  x, key, value, q_weight, k_weight, dy = (a.astype(jnp.float32) for a in (*inputs, dy_NxMxD))
  width = x.shape[-1]
  dgate_NxM = jnp.sum(dy * value[:, None], axis=-1)
  # A dead token's gate is the constant 0, whose slope gate * (1 - gate) is 0 as well.
  droot_NxM = dgate_NxM * gate_NxM * (1 - gate_NxM)
  size_NxM = jnp.abs(dot_NxM)
  slope_NxM = jnp.where(
    size_NxM > DOT_FLOOR, 0.5 * jax.lax.rsqrt(jnp.maximum(size_NxM, DOT_FLOOR)), 0
  )
  ddot_NxM = droot_NxM * slope_NxM
  # dot = (sum_d x key w) * x_scale * key_scale / sqrt(D); the scales depend on x and key too.
  dsum_NxMx1 = (ddot_NxM * x_scale_NxM * key_scale_NxM * width**-0.5)[..., None]
  x_pull_NxMx1 = (ddot_NxM * dot_NxM * x_scale_NxM**2 / width)[..., None]
  key_pull_NxMx1 = (ddot_NxM * dot_NxM * key_scale_NxM**2 / width)[..., None]
  weight_MxD = q_weight * k_weight
  dx_NxMxD = dy + dsum_NxMx1 * key * weight_MxD - x_pull_NxMx1 * x
  dkey_NxMxD = dsum_NxMx1 * x * weight_MxD - key_pull_NxMx1 * key
  dvalue_NxD = jnp.sum(gate_NxM[..., None] * dy, axis=1)
  dweight_MxD = jnp.sum(dsum_NxMx1 * x * key, axis=0)
  gradients = (dx_NxMxD, dkey_NxMxD, dvalue_NxD, dweight_MxD * k_weight, dweight_MxD * q_weight)
  return (*(g.astype(a.dtype) for g, a in zip(gradients, inputs, strict=True)), None)


gate.defvjp(_forward, _backward)
