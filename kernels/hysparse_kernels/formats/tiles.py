"""Decoding a tile of packed rows inside a TPU kernel: the codecs of this package, in lanes.

Only what vector units have: integers of 32 bits, shifts, selects and one small product. The codecs
themselves are the ones of `minifloat` and `e8m0`, so a tile decodes to the bit as `Stored.decode`
does.

Channels lie in lanes (`decode`) or, as TPUs keep arrays of narrow rows, in sublanes
(`decode_columns`), where a scale reaches its channels without a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hysparse_kernels.formats import e8m0
from hysparse_kernels.formats.minifloat import e4m3
from hysparse_kernels.formats.quantisers import QUANTISERS
from hysparse_kernels.formats.stored import Stored


def width(rows: Stored) -> int:
  """Channels of a decoded tile: those of the rows, and a zero behind an odd number of E2M1 ones."""
  codes = rows.parts.get("codes")
  return rows.channels if codes is None else codes.shape[-1] * codes_in_a_byte(rows.format)


def codes_in_a_byte(format: str) -> int:
  return 2 if QUANTISERS[format].element.sign_bit < 16 else 1


def decode(rows: Stored) -> Float[Array, "N W"]:
  """The values of a tile of rows [N, C] that is in registers, float32."""
  if "values" in rows.parts:
    return rows.parts["values"].astype(jnp.float32)
  codes = _codes(rows, axis=1)
  # Each lane receives the scale of its block as a product with zeros and ones. Codes of scales, up
  # to 255, and not their values: they are exact in any precision that a product may have, and a
  # NaN stays with its block.
  scales = rows.parts["scales"].astype(jnp.int32).astype(jnp.float32)
  shape = (scales.shape[1], codes.shape[1])
  block = QUANTISERS[rows.format].block
  begin = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * block
  channel = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  spread = ((channel >= begin) & (channel < begin + block)).astype(jnp.float32)
  scales = jnp.dot(scales, spread, preferred_element_type=jnp.float32).astype(jnp.int32)
  return _values(codes, scales, rows.format)


def decode_columns(rows: Stored) -> Float[Array, "W N"]:
  """The values of rows whose parts are transposed, [bytes, N]: each a column, float32."""
  if "values" in rows.parts:
    return rows.parts["values"].astype(jnp.float32)
  codes = _codes(rows, axis=0)
  scales = rows.parts["scales"].astype(jnp.int32)
  scales = jnp.repeat(scales, QUANTISERS[rows.format].block, axis=0)[: codes.shape[0]]
  return _values(codes, scales, rows.format)


def _codes(rows: Stored, axis: int) -> jax.Array:
  codes = rows.parts["codes"].astype(jnp.int32)
  if codes_in_a_byte(rows.format) == 1:
    return codes
  return jnp.concatenate([codes & 15, codes >> 4], axis=axis)  # halves: no channel moves


def _values(codes: jax.Array, scales: jax.Array, format: str) -> jax.Array:
  quantiser = QUANTISERS[format]
  values = quantiser.element.decode(codes)
  if quantiser.scale == "e8m0":
    return e8m0.multiply(values, scales)
  return values * e4m3.decode(scales)
