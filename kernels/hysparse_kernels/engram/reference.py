"""The plain definition of the gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# |dot| is held above this before the root, so that the gate's slope stays finite.
DOT_FLOOR = 1e-6


def gate(
  x_NxMxD: jax.Array,
  key_NxMxD: jax.Array,
  value_NxD: jax.Array,
  q_weight_MxD: jax.Array,
  k_weight_MxD: jax.Array,
  dead_N: jax.Array,
  eps: float,
) -> jax.Array:
  gate_NxM = openings(x_NxMxD, key_NxMxD, q_weight_MxD, k_weight_MxD, dead_N, eps)
  value_NxD = value_NxD.astype(jnp.float32)
  x = x_NxMxD.astype(jnp.float32) + gate_NxM[..., None] * value_NxD[:, None]
  return x.astype(x_NxMxD.dtype)


def openings(
  x_NxMxD: Float[Array, "N M D"],
  key_NxMxD: Float[Array, "N M D"],
  q_weight_MxD: Float[Array, "M D"],
  k_weight_MxD: Float[Array, "M D"],
  dead_N: Bool[Array, "N"],
  eps: float,
) -> Float[Array, "N M"]:
  """How far each stream lets a token's value in, 0 to 1."""
  x, key, q_weight, k_weight = (
    a.astype(jnp.float32) for a in (x_NxMxD, key_NxMxD, q_weight_MxD, k_weight_MxD)
  )
  inverse_rms = lambda a: jax.lax.rsqrt(jnp.mean(a * a, axis=-1) + eps)  # noqa: E731
  dot_NxM = jnp.sum(x * q_weight * k_weight * key, axis=-1)
  dot_NxM *= inverse_rms(x) * inverse_rms(key) * x.shape[-1] ** -0.5
  root_NxM = jnp.sqrt(jnp.maximum(jnp.abs(dot_NxM), DOT_FLOOR))
  # The sign of -0.0 is negative, as copysign has it.
  gate_NxM = jax.nn.sigmoid(jnp.where(jnp.signbit(dot_NxM), -root_NxM, root_NxM))
  return jnp.where(dead_N[:, None], 0, gate_NxM)
