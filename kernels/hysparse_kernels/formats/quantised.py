"""Weights that stay quantised as a checkpoint stores them, until they are used.

    fp8_tile  E4M3 [..., out, in],     E8M0 [..., ceil(out / 32), ceil(in / 32)]  linear layers
    fp8_row   E4M3 [..., out, in],     E8M0 [..., out, ceil(in / 32)]             Engram tables
    mxfp4     E2M1 [..., out, in / 2], E8M0 [..., out, ceil(in / 32)]             routed experts

Source: the released checkpoint of arXiv 2609.19969.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from hysparse_kernels.formats.packing import EvenColumnLow
from hysparse_kernels.formats.quantisers import QUANTISERS, Quantiser

WeightFormat = Literal["fp8_tile", "fp8_row", "mxfp4"]

TILE = 32  # columns that share a scale, and rows of a tile

# The block quantiser that each format takes its codes and scales from.
_QUANTISERS = {"fp8_tile": "fp8", "fp8_row": "fp8", "mxfp4": "mxfp4"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
  """Codes and scales of a weight [..., out, in]: the transpose of our plain [..., in, out] arrays.

  The arrays may be NumPy's (a memory-mapped file, say) or jax's; those before the last two axes
  count layers or experts.

  Attributes:
    codes: uint8, as on disk; "mxfp4" packs two columns a byte, the even one low.
    scales: uint8 E8M0.
    format: how to read them (static).
  """

  codes: UInt8[Array, "..."]
  scales: UInt8[Array, "..."]
  format: WeightFormat = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the dequantised array."""
    columns = self.codes.shape[-1] * (2 if self.format == "mxfp4" else 1)
    return (*self.codes.shape[:-1], columns)

  @property
  def ndim(self) -> int:
    return self.codes.ndim

  def dequantise(self, dtype: jnp.dtype = jnp.float32) -> Float[Array, "... out in"]:
    """The weight, exact in float32 and in bfloat16 where its values are normal numbers."""
    quantiser, codes = _quantiser(self.format), self.codes
    if self.format == "mxfp4":
      codes = EvenColumnLow(codes, self.shape[-1]).unpack()
    tiles = _tiles(quantiser.element.decode(codes), self.format)
    values = quantiser.rescale(tiles, jnp.asarray(self.scales)[..., None, :])
    return _untile(values, self.shape).astype(dtype)

  def __getitem__(self, index: Any) -> Quantised:
    """Part of the leading axes: layers or experts, and rows of formats that scale each row.

    Raises:
      IndexError: an index that reaches the axes which tiles or packed columns divide.
    """
    if index is Ellipsis:
      return self
    indices = index if isinstance(index, tuple) else (index,)
    free = self.ndim - (2 if self.format == "fp8_tile" else 1)
    if len(indices) > free or any(i is Ellipsis or i is None for i in indices):
      raise IndexError(f"{self.format} {self.shape}: only its first {free} axes can be indexed")
    return Quantised(self.codes[index], self.scales[index], self.format)


def quantise(x: Float[Array, "... out in"], format: WeightFormat) -> Quantised:
  """Quantises a weight by the rules of the "fp8" and "mxfp4" blocks (quantisers.py).

  Raises:
    ValueError: an unknown format, or an odd number of "mxfp4" columns.
  """
  quantiser = _quantiser(format)
  if format == "mxfp4" and x.shape[-1] % 2:
    raise ValueError(f"mxfp4: {x.shape[-1]} columns; two share a byte, so they must be even")
  tiles = _tiles(jnp.asarray(x).astype(jnp.float32), format)
  *leading, rows, height, columns, width = tiles.shape
  whole = tiles.swapaxes(-3, -2).reshape(*leading, rows, columns, height * width)
  scales = quantiser.scale_codes(whole)
  codes = _untile(quantiser.element.encode(quantiser.divide(tiles, scales[..., None, :])), x.shape)
  codes = EvenColumnLow.pack(codes).bytes if format == "mxfp4" else codes
  return Quantised(codes, scales, format)


def _quantiser(format: str) -> Quantiser:
  if format not in _QUANTISERS:
    raise ValueError(f"format: is '{format}'; must be one of {', '.join(_QUANTISERS)}")
  return QUANTISERS[_QUANTISERS[format]]


def _tiles(x: jax.Array, format: WeightFormat) -> jax.Array:
  """[..., out, in] to [..., tile row, row, tile column, column], filled with zeros."""
  height, width = TILE if format == "fp8_tile" else 1, TILE
  rows, columns = -(-x.shape[-2] // height), -(-x.shape[-1] // width)
  fill = (rows * height - x.shape[-2], columns * width - x.shape[-1])
  if any(fill):
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n) for n in fill])
  return x.reshape(*x.shape[:-2], rows, height, columns, width)


def _untile(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_tiles`, for an array of this shape."""
  *leading, rows, height, columns, width = tiles.shape
  whole = tiles.reshape(*leading, rows * height, columns * width)
  return whole[..., : shape[-2], : shape[-1]]
