"""A matrix without a bias, and a root-mean-square norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hysparse.nn import init


class Linear(nnx.Module):
  """x @ weight, in the dtype of x; weight is [inputs, outputs] in float32."""

  def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, gain: float = 1.0):
    self.weight = nnx.Param(init.matrix(rngs.params(), (inputs, outputs), gain))

  def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    return x @ self.weight[...].astype(x.dtype)


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in the dtype of x."""

  def __init__(self, channels: int, eps: float):
    self.eps = eps
    self.weight = nnx.Param(jnp.ones((channels,), jnp.float32))

  def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
    return (wide * self.weight[...]).astype(x.dtype)
