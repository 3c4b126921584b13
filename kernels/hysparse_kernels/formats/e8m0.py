"""E8M0: a power of two as one byte, 2^(byte - 127); 255 is NaN.

Source: OCP Microscaling Formats v1.0, section 5.4.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from hysparse_kernels.formats.bits import bits_of, float_of, power_of_two

NAN = 255
_HALF = 0x00400000  # the bits of 2^-127, a subnormal of float32


def encode(x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
  """The smallest power of two that is at least x; 2^-127 for zero.

  255 (NaN) for what has none: NaN, infinity, negative numbers, anything above 2^127.
  """
  bits = bits_of(jnp.asarray(x, jnp.float32))
  exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
  up = mantissa > jnp.where(exponent == 0, _HALF, 0)
  negative = (bits >> 31 != 0) & (bits << 1 != 0)
  return jnp.where(negative, NAN, jnp.minimum(exponent + up, NAN)).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
  """The float32 powers of two. Arithmetic on CPU reads byte 0 as zero: see `multiply`."""
  codes = jnp.asarray(codes).astype(jnp.uint32)
  bits = jnp.where(codes == 0, _HALF, codes << 23)
  return float_of(jnp.where(codes == NAN, jnp.uint32(0x7FC00000), bits))


def multiply(x: Float[Array, "..."], codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
  """x times the decoded codes, broadcast; exact wherever x and the product are normal floats.

  In two steps, because 2^-127 itself is not normal and CPUs flush it to zero. A product below
  2^-126 is flushed there, too.
  """
  codes = jnp.asarray(codes).astype(jnp.int32)
  lower = codes >> 1
  first, second = power_of_two(lower - 64), power_of_two(codes - lower - 63)
  return x * first * jnp.where(codes == NAN, jnp.nan, second)
