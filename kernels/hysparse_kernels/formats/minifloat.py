"""Small floating-point formats: E2M1 and E4M3, as uint8 codes and as rounded float32 values.

    E2M1  0, .5, 1, 1.5, 2, 3, 4, 6 and the same negated (bit 3); no infinity, no NaN
    E4M3  2^-9 to 448 and the same negated (bit 7); no infinity, NaN is 0x7f and 0xff

Both round to nearest, ties to the even code, and saturate. Everything is exact float32 or integer
arithmetic: casts to float8 and float4 types differ between platforms (and overflow to NaN).

Source: OCP Microscaling Formats v1.0, section 5.3 (E4M3 there is the "fn" variant).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from hysparse_kernels.formats.bits import bits_of, power_of_two


@dataclasses.dataclass(frozen=True)
class Minifloat:
  """A format of 1 sign bit, `exponent_bits` and `mantissa_bits`.

  Attributes:
    bias: of the exponent; the exponent field 0 holds zero and the subnormals.
    largest: largest finite value, where rounding saturates.
    has_nan: whether the code with all ones is a NaN.
  """

  exponent_bits: int
  mantissa_bits: int
  bias: int
  largest: float
  has_nan: bool

  @property
  def sign_bit(self) -> int:
    return 1 << (self.exponent_bits + self.mantissa_bits)

  @property
  def nan_code(self) -> int:
    return self.sign_bit - 1

  def round(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The nearest value of the format, float32; signed zeros and NaN stay what they are."""
    x = jnp.asarray(x, jnp.float32)
    count, exponent, _ = self._steps(x)
    return jnp.copysign(count * power_of_two(exponent - self.mantissa_bits), x)

  def encode(self, x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The codes of the nearest values. Without a NaN code, a NaN becomes the largest value.

    Block quantisers therefore put NaN into the scale (quantisers.py).
    """
    x = jnp.asarray(x, jnp.float32)
    count, exponent, sign = self._steps(x)
    # Codes are numbered by value, 2^mantissa_bits to each exponent: a count that reaches the next
    # power of two gives its first code, so rounding up needs no carry.
    code = (exponent + self.bias - 1 << self.mantissa_bits) + count.astype(jnp.int32)
    missing = self.nan_code if self.has_nan else self.nan_code & self.sign_bit - 1
    code = jnp.where(jnp.isnan(x), missing, code)
    return jnp.where(sign, code | self.sign_bit, code).astype(jnp.uint8)

  def decode(self, codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 values of codes; bits above the sign are ignored."""
    magnitude = jnp.asarray(codes).astype(jnp.int32) & self.sign_bit - 1
    field = magnitude >> self.mantissa_bits
    exponent = jnp.maximum(field, 1)
    count = magnitude - (exponent - 1 << self.mantissa_bits)
    value = count.astype(jnp.float32) * power_of_two(exponent - self.bias - self.mantissa_bits)
    if self.has_nan:
      value = jnp.where(magnitude == self.nan_code, jnp.nan, value)
    return jnp.where(jnp.asarray(codes) & self.sign_bit != 0, -value, value)

  def _steps(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """|x| as (whole steps, exponent, sign is set): a step is 2^(exponent - mantissa_bits)."""
    bits = bits_of(x)
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude > self.largest, self.largest, magnitude)  # keeps NaN
    exponent = (bits_of(magnitude) >> 23).astype(jnp.int32) - 127
    # The exponent of a NaN must not reach the code or a power of two.
    exponent = jnp.clip(exponent, 1 - self.bias, 8)
    count = jnp.round(magnitude * power_of_two(self.mantissa_bits - exponent))
    return count, exponent, bits >> 31 != 0


e2m1 = Minifloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_nan=False)
e4m3 = Minifloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_nan=True)
