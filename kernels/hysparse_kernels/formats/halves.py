"""Rows for a GPU kernel: gathered, decoded, and cut into two halves of their channels.

A byte of E2M1 codes holds a channel of the first half and one of the second. Cutting everything
that has channels (queries, keys, results) into halves lets a nibble be decoded where it was loaded:
scores are the sum of two products, and no channel changes its place.

A half is read as groups of channels that share a scale, three axes [rows, groups, channels], so
that a scale is loaded once for its group. Where blocks of scales do not divide a half, the groups
are as wide as both allow.

Bytes are loaded as words of up to four: a load moves more, and Pallas counts in 32 bits up to 2^32
bytes, which is too little for single ones beyond 2^31.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hysparse_kernels.formats import e8m0
from hysparse_kernels.formats.bits import float_of
from hysparse_kernels.formats.minifloat import e4m3
from hysparse_kernels.formats.quantisers import QUANTISERS
from hysparse_kernels.formats.stored import Stored

_SMALLEST = 16  # size of an axis that a tensor core sums over
_ONE_HALF = 0x3F000000  # the bits of 0.5


def width(channels: int) -> int:
  """Places of half the channels in a kernel: a power of two, the last ones empty."""
  return max(_SMALLEST, pl.next_power_of_2(_half(channels)))


def load_pair(
  ref: jax.Array, at: tuple[jax.Array | int, ...], there_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Both halves [N, width] of plain rows; zeros for those that are not there.

  Args:
    at: index of each row, [N] or one number for each leading axis.
  """
  return tuple(
    plgpu.load(ref.at[index], mask=mask & there_N[:, None], other=0)
    for index, mask in (pair_index(at, ref.shape[-1], half) for half in (0, 1))
  )


def pair_index(
  at: tuple[jax.Array | int, ...], channels: int, half: int
) -> tuple[tuple[jax.Array | int, ...], jax.Array]:
  """(index [N, width] of one half of rows of channels, which of its places are channels)."""
  place_1xP = jnp.arange(width(channels))[None]
  channel_1xP = half * _half(channels) + place_1xP
  rows = tuple(i[:, None] if jnp.ndim(i) else i for i in at)
  return (*rows, channel_1xP), (place_1xP < _half(channels)) & (channel_1xP < channels)


def in_words(rows: Stored) -> Stored:
  """The same rows for `load`: codes in words of up to four bytes, which costs nothing on a GPU.

  Raises:
    ValueError: bytes that cannot be addressed.
  """
  parts = dict(rows.parts)
  if "codes" in parts and (size := _word(rows)) > 1:
    codes = parts["codes"].reshape(*parts["codes"].shape[:-1], -1, size)
    parts["codes"] = jax.lax.bitcast_convert_type(codes, jnp.dtype(f"uint{8 * size}"))
  for name, part in parts.items():
    if part.dtype.itemsize == 1 and 2**31 < part.size <= 2**32:
      raise ValueError(f"{name} {part.shape}: Pallas cannot address that many bytes one by one")
  return dataclasses.replace(rows, parts=parts)


def from_words(rows: Stored) -> Stored:
  """The inverse of `in_words`."""

  def bytes_of(part: jax.Array) -> jax.Array:
    if not jnp.issubdtype(part.dtype, jnp.unsignedinteger) or part.dtype == jnp.uint8:
      return part
    return jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(*part.shape[:-1], -1)

  return jax.tree.map(bytes_of, rows)


def load(
  rows: Stored, at: tuple[jax.Array | int, ...], there_N: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
  """Both halves [N, width] of rows whose parts are references from `in_words`, decoded exactly.

  Args:
    at: index of each row, [N] or one number for each leading axis.
    there_N: rows that are not there are not read, and zero.
  """
  if "values" in rows.parts:
    return tuple(x.astype(dtype) for x in load_pair(rows.parts["values"], at, there_N))
  groups = Groups.of(rows)
  at = tuple(i[:, None, None] if jnp.ndim(i) else i for i in at)
  there_Nx1x1 = there_N[:, None, None]
  codes = rows.parts["codes"]
  if groups.packed:
    both = _load_bytes(codes, groups, at, there_Nx1x1, 0)
    pair = _e2m1(both), _e2m1(both >> 4)
  else:
    pair = [e4m3.decode(_load_bytes(codes, groups, at, there_Nx1x1, half)) for half in (0, 1)]
  halves = []
  for half, values_NxGxW in enumerate(pair):
    channel, real = groups.first_channels(half)
    index = (*at, channel // groups.block)
    scales = plgpu.load(rows.parts["scales"].at[index], mask=there_Nx1x1 & real, other=0)
    if QUANTISERS[rows.format].scale == "e4m3":
      values_NxGxW *= e4m3.decode(scales)
    else:
      values_NxGxW = e8m0.multiply(values_NxGxW, scales)
    halves.append(values_NxGxW.reshape(len(there_N), -1).astype(dtype))
  return tuple(halves)


@dataclasses.dataclass(frozen=True)
class Groups:
  """Channels of a half in groups that share a scale.

  Attributes:
    channels: of the rows.
    block: channels that share a scale.
    packed: two codes share a byte.
    size: channels of a group, a power of two.
    count: groups of a half, a power of two with the empty ones at its end.
  """

  channels: int
  block: int
  packed: bool
  size: int
  count: int

  @classmethod
  def of(cls, rows: Stored) -> Groups:
    quantiser = QUANTISERS[rows.format]
    size = math.gcd(_half(rows.channels), quantiser.block)
    count = width(rows.channels) // size
    return cls(rows.channels, quantiser.block, quantiser.element.sign_bit < 16, size, count)

  def first_channels(self, half: int) -> tuple[jax.Array, jax.Array]:
    """(the first channel [1, count, 1] of each group of a half, which of them there are)."""
    channel = half * _half(self.channels) + jnp.arange(self.count)[None, :, None] * self.size
    return channel, self.real(half, channel)

  def real(self, half: int, channel: jax.Array) -> jax.Array:
    """Whether channels, counted on from the first one of a half, are of that half."""
    return (channel < (half + 1) * _half(self.channels)) & (channel < self.channels)


def store_bytes(
  ref: jax.Array,
  groups: Groups,
  at: tuple[jax.Array, ...],
  there_N: jax.Array,
  half: int,
  bytes_NxGxW: jax.Array,
) -> None:
  """Writes one half of the bytes of rows, int32 of 8 bits each; those that are not there stay."""
  index, mask = _words(ref, groups, half)
  word = ref.dtype.itemsize
  parts = bytes_NxGxW.reshape(len(there_N), groups.count, -1, word)
  words = (parts << 8 * jnp.arange(word, dtype=jnp.int32)).sum(-1).astype(ref.dtype)
  mask = mask & there_N[:, None, None]
  plgpu.store(ref.at[(*(i[:, None, None] for i in at), index)], words, mask=mask)


def _load_bytes(
  ref: jax.Array, groups: Groups, at: tuple, there_Nx1x1: jax.Array, half: int
) -> jax.Array:
  """Bytes [N, count, size] of one half of the bytes of rows: int32, above 8 bits anything."""
  index, mask = _words(ref, groups, half)
  words = plgpu.load(ref.at[(*at, index)], mask=mask & there_Nx1x1, other=0).astype(jnp.int32)
  shift = 8 * jnp.arange(ref.dtype.itemsize, dtype=jnp.int32)
  return (words[..., None] >> shift).reshape(-1, groups.count, groups.size)


def _words(ref: jax.Array, groups: Groups, half: int) -> tuple[jax.Array, jax.Array]:
  """Indices [1, count, words] of a half of the words of a row, and which of them there are.

  The others are beyond the row.
  """
  word = ref.dtype.itemsize
  words, half_words = groups.size // word, _half(groups.channels) // word
  place = jnp.arange(groups.count)[None, :, None] * words + jnp.arange(words)
  index = half * half_words + place
  there = (place < half_words) & (index < ref.shape[-1])
  return jnp.where(there, index, ref.shape[-1]), there


def _half(channels: int) -> int:
  return -(-channels // 2)


def _word(rows: Stored) -> int:
  """Bytes of the words that divide the codes of a group."""
  bytes_ = rows.parts["codes"].shape[-1]
  return math.gcd(_half(rows.channels), bytes_, QUANTISERS[rows.format].block, 4)


def _e2m1(codes: jax.Array) -> jax.Array:
  """Values of E2M1 codes, put together as the bits of float32; bits above the sign are ignored."""
  magnitude = codes & 7
  # 0 and 0.5 are subnormal; from 1 on, the code is the exponent and one bit of the mantissa.
  bits = magnitude * _ONE_HALF
  bits = jnp.where(magnitude < 2, bits, (magnitude << 22) + _ONE_HALF)
  return float_of(bits | (codes & 8) << 28)
