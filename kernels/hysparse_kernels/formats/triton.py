"""Rows of every format, gathered and decoded inside a Triton kernel.

A row is read as two halves of its channels, as packed E2M1 codes lie in memory: a byte holds one
channel of each. So no kernel ever joins or splits a tile, it only takes two products instead of one
(plain rows and E4M3 codes are read the same way).

Codes become floats by integer arithmetic, without subnormals: exact, and to the bit what
`Stored.decode` gives. Importing this needs Triton, whose interpreter computes wrongly with
bfloat16: kernels have a flag to use float32 in it (`as_operand`).
"""

import jax
import triton
import triton.language as tl

from hysparse_kernels.formats.stored import Stored


def pair(rows: Stored) -> tuple[jax.Array, jax.Array]:
  """Codes and scales as a kernel takes them, or values in the place of both."""
  if "values" in rows.parts:
    return rows.parts["values"], rows.parts["values"]
  return rows.parts["codes"], rows.parts["scales"]


@triton.jit
def decode_e2m1(codes):
  """float32 values of int32 codes below 16."""
  return _decode(codes, SIGN=3, MANTISSA=1, BIAS=1)


@triton.jit
def decode_e4m3(codes):
  """float32 values of int32 codes below 256."""
  return tl.where((codes & 127) == 127, float("nan"), _decode(codes, SIGN=7, MANTISSA=3, BIAS=7))


@triton.jit
def _decode(codes, SIGN: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
  """Values of codes with their sign in bit SIGN (see `Minifloat`)."""
  magnitude = codes & ((1 << SIGN) - 1)
  # From the first power of two on, a code is the exponent and the leading bits of the mantissa.
  normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
  # Below, it counts steps: so do the last bits of a float from 2^FAR on.
  FAR: tl.constexpr = 24 - BIAS - MANTISSA
  few = (magnitude | ((127 + FAR) << 23)).to(tl.float32, bitcast=True) - (1 << FAR)
  values = tl.where(magnitude < (1 << MANTISSA), few, normal.to(tl.float32, bitcast=True))
  bits = values.to(tl.int32, bitcast=True) | ((codes >> SIGN) << 31)
  return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(codes):
  """float32 powers of two of int32 codes below 256."""
  bits = tl.where(codes == 0, 0x00400000, codes << 23)  # 2^-127 is a subnormal
  return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bfloat16(x):
  """float32 values rounded to those of bfloat16, ties to even."""
  bits = x.to(tl.uint32, bitcast=True)
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
  return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # adding may lose a NaN


@triton.jit
def as_operand(x, WIDE: tl.constexpr, NARROW: tl.constexpr):
  """x as it enters a product: bfloat16, or (WIDE) float32, rounded to bfloat16 where NARROW."""
  if WIDE:
    wide = x.to(tl.float32)
    return round_to_bfloat16(wide) if NARROW else wide
  else:
    return x.to(tl.bfloat16)


@triton.jit
def load_halves(
  codes_ptr,
  scales_ptr,
  rows,
  there,
  FORMAT: tl.constexpr,
  CHANNELS: tl.constexpr,
  WIDTH: tl.constexpr,
):
  """The first and the second half of the channels of rows: two tiles [N, WIDTH].

  Args:
    codes_ptr: the part "codes", or "values" of formats without codes.
    scales_ptr: the part "scales", or anything.
    rows: [N] int64.
    there: [N]; rows that are not there are not read, and zeros.
    FORMAT: the name of the format; any other reads values.
    WIDTH: a power of two, at least half of CHANNELS; zeros (of a row with a NaN maybe that) stand
      behind the channels.

  Returns:
    Values in their own dtype, decoded codes in float32.
  """
  HALF: tl.constexpr = (CHANNELS + 1) // 2
  at = tl.arange(0, WIDTH)
  first = there[:, None] & (at < HALF)[None, :]
  second = first & (at < CHANNELS - HALF)[None, :]
  if FORMAT == "fp4" or FORMAT == "mxfp4":
    codes = tl.load(codes_ptr + rows[:, None] * HALF + at[None, :], mask=first, other=0)
    codes = codes.to(tl.int32)
    low, high = decode_e2m1(codes & 15), decode_e2m1(codes >> 4)
  else:
    places = codes_ptr + rows[:, None] * CHANNELS + at[None, :]
    low = tl.load(places, mask=first, other=0)
    high = tl.load(places + HALF, mask=second, other=0)
    if FORMAT == "fp8":
      low, high = decode_e4m3(low.to(tl.int32)), decode_e4m3(high.to(tl.int32))
  if FORMAT == "fp4" or FORMAT == "mxfp4" or FORMAT == "fp8":
    low *= _load_scales(scales_ptr, rows, there, 0, FORMAT, CHANNELS, WIDTH)
    high *= _load_scales(scales_ptr, rows, there, HALF, FORMAT, CHANNELS, WIDTH)
  return low, high


@triton.jit
def _load_scales(
  scales_ptr,
  rows,
  there,
  FIRST: tl.constexpr,
  FORMAT: tl.constexpr,
  CHANNELS: tl.constexpr,
  WIDTH: tl.constexpr,
):
  """The scale of each of WIDTH channels from FIRST on, [N, WIDTH] float32."""
  BLOCK: tl.constexpr = 16 if FORMAT == "fp4" else 32
  COUNT: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
  WHOLE: tl.constexpr = ((CHANNELS + 1) // 2) % BLOCK == 0
  ROWS: tl.constexpr = rows.shape[0]
  # Where a half has whole blocks, a scale is read once and spread over its block.
  STEP: tl.constexpr = BLOCK if WHOLE else 1
  block = (FIRST + tl.arange(0, WIDTH // STEP) * STEP) // BLOCK
  inside = there[:, None] & (block < COUNT)[None, :]
  codes = tl.load(scales_ptr + rows[:, None] * COUNT + block[None, :], mask=inside, other=0)
  values = decode_e4m3(codes.to(tl.int32)) if FORMAT == "fp4" else decode_e8m0(codes.to(tl.int32))
  if WHOLE:
    spread = tl.broadcast_to(values[:, :, None], [ROWS, WIDTH // STEP, STEP])
    values = tl.reshape(spread, [ROWS, WIDTH])
  return values
