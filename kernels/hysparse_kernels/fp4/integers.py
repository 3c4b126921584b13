"""Scales and codes of blocks in 32-bit integers: the rules of `formats`, to the bit, anywhere.

The quantisers divide, and round quotients to the nearest code. Accelerators divide approximately,
some have no rounding to even, and some read subnormals as zero. Integers have none of that:

- a power of two that is at least amax / L is read off the exponent and the mantissa of amax;
- the E4M3 code nearest to amax / 6 is a small number of units, divided by six with its rest;
- the E2M1 code nearest to x / scale is the number of middles between codes that x is beyond, each
  times the scale, which is exact (they are products of a few bits);
- an E4M3 code nearest to x / 2^e is a shift that rounds.

That a quotient is rounded to float32 before it is rounded to a code does not show: a middle times a
scale has so few bits that no other float32 is near enough.

Everything is elementwise, so a caller may keep the scale of a block once, or in every place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hysparse_kernels.formats import QUANTISERS, Format, e8m0
from hysparse_kernels.formats.minifloat import e4m3

_INFINITY = 0x7F800000
_MANTISSA = 0x7FFFFF
_ONE = 0x800000  # the bit that is not stored, and the bits of the smallest normal number
# Four times the middles between neighbouring E2M1 codes.
_E2M1_MIDDLES = (1, 3, 5, 7, 10, 14, 20)


def bits_of(x: Float[Array, "..."]) -> Int[Array, "..."]:
  """The bits of x as float32."""
  return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def magnitude(bits: Int[Array, "..."]) -> Int[Array, "..."]:
  """Bits without the sign: in the order of magnitudes, NaN above infinity."""
  return bits & 0x7FFFFFFF


def scale_codes(largest: Int[Array, "..."], format: Format) -> Int[Array, "..."]:
  """The scales of blocks whose largest `magnitude` this is, int32."""
  quantiser = QUANTISERS[format]
  largest = jnp.maximum(largest, _bits(quantiser.floor))
  if quantiser.scale == "e4m3":
    return _sixth_as_e4m3(largest)
  unit = _bits(quantiser.element.largest)
  up = (largest & _MANTISSA) > (unit & _MANTISSA)
  code = (largest >> 23) - (unit >> 23) + 127 + up.astype(jnp.int32)
  return jnp.where(largest >= _INFINITY, e8m0.NAN, code)


def codes(bits: Int[Array, "..."], scales: Int[Array, "..."], format: Format) -> Int[Array, "..."]:
  """The codes of values with these bits in blocks with these scales (int32, broadcast), int32."""
  quantiser = QUANTISERS[format]
  size, element = magnitude(bits), quantiser.element
  if element.has_nan:
    code, missing = _shifted_to_e4m3(size, scales), element.nan_code
  else:
    code, missing = _middles_below(size, scales, quantiser.scale), element.sign_bit - 1
  # In a block with a NaN every quotient is one. (Its sign is anybody's guess where x is NaN itself;
  # elsewhere there is none.)
  lost = scales == (e8m0.NAN if quantiser.scale == "e8m0" else e4m3.nan_code)
  if quantiser.floor < 2.0**-100:  # quotients of subnormals are made another way there
    lost &= size >= _ONE
  signed = (bits < 0) & (~lost | (size > _INFINITY))
  return jnp.where(lost, missing, code) | jnp.where(signed, element.sign_bit, 0)


def _bits(x: float) -> int:
  return int(np.float32(x).view(np.int32))


def _sixth_as_e4m3(size: jax.Array) -> jax.Array:
  """The nearest codes to the sixth of values from 6 * 2^-9 up."""
  exponent, significand = _parts(size)
  # 6 is 1.5 * 2^2. The quotient's exponent, but at least that of the subnormal codes:
  step = jnp.maximum(exponent - jnp.where(significand < _ONE + _ONE // 2, 130, 129), -6)
  # A step of the codes is 6 units.
  units, rest = _units(significand, step + 147 - exponent)
  nearest = (units + 3) * 43 >> 8  # by six, of numbers up to 99
  nearest -= ((6 * nearest == units + 3) & ~rest).astype(jnp.int32) & nearest  # odd, and a tie
  code = jnp.minimum(8 * (step + 6) + nearest, e4m3.nan_code - 1)
  return jnp.where(size > _INFINITY, e4m3.nan_code, code)


def _middles_below(size: jax.Array, scales: jax.Array, scale: str) -> jax.Array:
  """E2M1 codes: how many middles between codes, times the scale, a value is beyond."""
  if scale == "e4m3":  # factor * 2^power
    field = jnp.maximum(scales >> 3, 1)
    factor, power = scales - (field - 1 << 3), field - 10
  else:
    factor, power = 1, scales - 127
  exponent, significand = _parts(size)
  units, rest = _units(significand, power + 148 - exponent)  # four are the scale without factor
  above = units + rest.astype(jnp.int32)
  # On a middle, the even one of two codes is nearer.
  return sum(
    ((above > middle * factor) if code % 2 == 0 else (units >= middle * factor)).astype(jnp.int32)
    for code, middle in enumerate(_E2M1_MIDDLES)
  )


def _parts(size: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(exponent, significand): a value is significand * 2^(exponent - 150)."""
  implicit = jnp.where(size >= _ONE, jnp.int32(_ONE), jnp.int32(0))  # of normal numbers
  return jnp.maximum(size >> 23, 1), size & _MANTISSA | implicit


def _units(significand: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whole units of 2^shift, and whether there is more. (Of less than one, all is more.)"""
  shift = jnp.clip(shift, 0, 24)
  units = significand >> shift
  return units, units << shift != significand


def _shifted_to_e4m3(size: jax.Array, scales: jax.Array) -> jax.Array:
  """E4M3 codes of values over a power of two, given as an E8M0 code, that is 2^-100 or more."""
  exponent, significand = _parts(size)
  exponent -= scales  # the quotient's
  shift = 20 + jnp.clip(-6 - exponent, 0, 6)  # by 26, nothing is left
  half = (1 << shift - 1) - 1 + (significand >> shift & 1)  # a tie goes up from an odd number
  return 8 * (jnp.maximum(exponent, -6) + 6) + (significand + half >> shift)
