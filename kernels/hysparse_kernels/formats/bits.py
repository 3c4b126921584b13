"""float32 to the bit: exponents without log or exp2, and quotients that are rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def bits_of(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
  """The bits of float32 values."""
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def float_of(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
  """The float32 values with these bits."""
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def power_of_two(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
  """2^exponent in float32, for exponents -126..127."""
  return float_of((exponent + 127 << 23).astype(jnp.uint32))


def divide(x: Float[Array, "..."], by: Float[Array, "..."]) -> Float[Array, "..."]:
  """x / by, broadcast.

  XLA makes a product with the reciprocal, which rounds differently, of a division by a constant or
  a broadcast. It cannot where each element chooses its divisor.
  """
  return x / jnp.where(jnp.isnan(x), jnp.nan, by)
