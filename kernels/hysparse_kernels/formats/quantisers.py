"""The block quantisers of the precision dial, and fake quantisation with them.

    fp4    E2M1 codes, per 16 channels an E4M3 scale      amax >= 6 * 2^-9, scale = amax / 6
    mxfp4  E2M1 codes, per 32 channels an E8M0 scale      amax >= 6 * 2^-126, 2^ceil(log2(amax / 6))
    fp8    E4M3 codes, per 32 channels an E8M0 scale      amax >= 1e-4, 2^ceil(log2(amax / 448))

Blocks lie along the last axis; the last one may be shorter. Values are divided by the scale (no
product with a reciprocal), clamped to the largest code and rounded to nearest, ties to the even
code. All of it is exact under jit, on platforms that flush subnormals, too.

A NaN makes its whole block NaN, through the scale. So does an infinity where the scale is E8M0 (no
power of two is as large); under "fp4" it saturates at 6 * 448 like every value above that.

Source: arXiv 2609.19969 and the released code.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from hysparse_kernels.formats import e8m0
from hysparse_kernels.formats.bits import bits_of, divide, float_of, power_of_two
from hysparse_kernels.formats.minifloat import Minifloat, e2m1, e4m3

Format = Literal["fp4", "mxfp4", "fp8", "bf16", "f32"]


class Blocks(NamedTuple):
  """Codes, one a byte, and the scale of each block."""

  codes: UInt8[Array, "... C"]
  scales: UInt8[Array, "... blocks"]


@dataclasses.dataclass(frozen=True)
class Quantiser:
  """A way to quantise blocks of values that share a scale.

  Attributes:
    element: the format of the codes.
    scale: of the scales.
    block: channels of a block.
    floor: smallest amax, so that a block of zeros has a scale.
  """

  element: Minifloat
  scale: Literal["e4m3", "e8m0"]
  block: int
  floor: float

  def scale_codes(self, x: Float[Array, "... C"]) -> UInt8[Array, "..."]:
    """The scale of each block of C float32 values."""
    # As integers, magnitudes keep their order, and NaN is above infinity.
    largest = (bits_of(x) & 0x7FFFFFFF).max(-1)
    amax = float_of(jnp.maximum(largest, np.float32(self.floor).view(np.uint32)))
    if self.scale == "e8m0":  # the released code has the product with the rounded reciprocal here
      return e8m0.encode(amax * np.float32(1 / self.element.largest))
    return e4m3.encode(divide(amax, np.float32(self.element.largest)))

  def divide(self, x: Float[Array, "... C"], scales: UInt8[Array, "..."]) -> Float[Array, "... C"]:
    """x / scale, of float32 values that may be subnormal."""
    ratio = divide(x, self.decode_scales(scales)[..., None])
    if self.floor > self.element.largest * 2.0**-100:
      return ratio  # nothing subnormal is large enough to count
    # CPUs read subnormals as zero: take them as integers, in units of 2^-126, and the scale, too.
    # (A scale above 1 makes them vanish as 1 does.)
    bits = bits_of(x)
    units = jnp.copysign((bits & 0x7FFFFF).astype(jnp.float32) * 2.0**-23, x)
    exponent = jnp.minimum(scales.astype(jnp.int32), 127)[..., None] - 127
    return jnp.where(bits >> 23 & 255 == 0, units * power_of_two(-126 - exponent), ratio)

  def decode_scales(self, scales: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The scales in float32."""
    return e4m3.decode(scales) if self.scale == "e4m3" else e8m0.decode(scales)

  def rescale(
    self, values: Float[Array, "... C"], scales: UInt8[Array, "..."]
  ) -> Float[Array, "... C"]:
    """Values of codes times their scale."""
    if self.scale == "e8m0":
      return e8m0.multiply(values, scales[..., None])
    return values * e4m3.decode(scales)[..., None]

  def quantise(self, x: Float[Array, "... C"]) -> tuple[UInt8[Array, "... C"], UInt8[Array, "..."]]:
    """Codes and scales of float32 blocks."""
    scales = self.scale_codes(x)
    return self.element.encode(self.divide(x, scales)), scales


QUANTISERS = {
  "fp4": Quantiser(e2m1, "e4m3", block=16, floor=6 * 2.0**-9),
  "mxfp4": Quantiser(e2m1, "e8m0", block=32, floor=6 * 2.0**-126),
  "fp8": Quantiser(e4m3, "e8m0", block=32, floor=1e-4),
}


def quantise_blocks(x: Float[Array, "... C"], format: Format) -> Blocks:
  """Codes [..., C] and scales [..., ceil(C / block)], uint8.

  Raises:
    ValueError: a format without codes.
  """
  quantiser = _quantiser(format)
  width = x.shape[-1]
  codes, scales = quantiser.quantise(_split(x, quantiser.block))
  return Blocks(_join(codes, width), scales)


def dequantise_blocks(
  codes: UInt8[Array, "... C"],
  scales: UInt8[Array, "... blocks"],
  format: Format,
  dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "... C"]:
  """The values of codes, exact in float32 and in bfloat16.

  Raises:
    ValueError: a format without codes.
  """
  quantiser = _quantiser(format)
  values = _split(quantiser.element.decode(codes), quantiser.block)
  return _join(quantiser.rescale(values, jnp.asarray(scales)), codes.shape[-1]).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def fake_quant(x: Float[Array, "... C"], format: Format) -> Float[Array, "... C"]:
  """x as it comes back from being stored in a format of the dial, in its own dtype.

  The gradient is straight through: as if nothing had been rounded. "f32" returns x itself.

  Raises:
    ValueError: an unknown format.
  """
  if format == "f32":
    return x
  if format == "bf16":
    return round_to(x, jnp.bfloat16)
  quantiser = _quantiser(format)
  blocks = _split(x, quantiser.block)
  scales = quantiser.scale_codes(blocks)
  values = quantiser.element.round(quantiser.divide(blocks, scales))
  return _join(values * quantiser.decode_scales(scales)[..., None], x.shape[-1]).astype(x.dtype)


@fake_quant.defjvp
def _straight_through(format, primals, tangents):
  return fake_quant(*primals, format), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
  """x rounded to the values of a narrower dtype, in its own dtype.

  Not two casts: XLA may leave out a pair of them. The gradient is straight through.
  """
  info = jnp.finfo(dtype)
  if info.bits >= jnp.finfo(x.dtype).bits:
    return x
  return jax.lax.reduce_precision(x, info.nexp, info.nmant)


@round_to.defjvp
def _pass_through(dtype, primals, tangents):
  return round_to(*primals, dtype), tangents[0]


def _quantiser(format: str) -> Quantiser:
  if format not in QUANTISERS:
    known = ", ".join(QUANTISERS)
    raise ValueError(f"format: is '{format}'; must be {known} (or, without codes, bf16 or f32)")
  return QUANTISERS[format]


def _split(x: jax.Array, block: int) -> jax.Array:
  """[..., C] to float32 [..., blocks, block], the last one filled with zeros."""
  width = x.shape[-1]
  count = -(-width // block)
  if count * block != width:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * block - width)])
  return x.reshape(*x.shape[:-1], count, block).astype(jnp.float32)


def _join(x: jax.Array, width: int) -> jax.Array:
  """[..., blocks, block] to [..., C]."""
  return x.reshape(*x.shape[:-2], -1)[..., :width]
