"""A matrix without a bias, and a root-mean-square norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.formats import fake_quant
from jaxtyping import Array, Float

from hysparse.nn import init, weights


class Linear(nnx.Module):
  """x @ weight, in the dtype of x; weight is [inputs, outputs] in float32, or quantised.

  `fp8_input` quantises x in blocks of 32 channels first, as the released code does in front of
  every matrix that its checkpoint stores quantised.
  """

  def __init__(
    self,
    inputs: int,
    outputs: int,
    *,
    rngs: nnx.Rngs,
    gain: float = 1.0,
    fp8_input: bool = False,
  ):
    self.fp8_input = fp8_input
    self.weight = nnx.Param(init.matrix(rngs.params(), (inputs, outputs), gain))

  def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    if self.fp8_input:
      x = fake_quant(x, "fp8")
    return weights.matmul(x, self.weight)


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in the dtype of x."""

  def __init__(self, channels: int, eps: float):
    self.eps = eps
    self.weight = nnx.Param(jnp.ones((channels,), jnp.float32))

  def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
    return (wide * self.weight[...]).astype(x.dtype)
