"""Two E2M1 codes in a byte, in the two orders in use: each is a type that decodes only itself.

    EvenColumnLow  checkpoints  byte i: channel 2i in the low nibble, 2i + 1 in the high one
    SplitHalf      the cache    byte i: channel i in the low nibble, i + n in the high one

of n = ceil(C / 2) bytes; with an odd number of channels the last high nibble is 0. Kernels prefer
halves, because joining them moves no single channel.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvenColumnLow:
  """Packed codes of checkpoints, [..., ceil(C / 2)] for C channels."""

  bytes: UInt8[Array, "... n"]
  channels: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def pack(cls, codes: UInt8[Array, "... C"]) -> Self:
    """Packs codes, one a byte."""
    pairs = _even(codes).reshape(*codes.shape[:-1], -1, 2)
    return cls(_join(pairs[..., 0], pairs[..., 1]), codes.shape[-1])

  def unpack(self) -> UInt8[Array, "... C"]:
    """Codes, one a byte."""
    codes = jnp.stack(_nibbles(self.bytes), axis=-1)
    return codes.reshape(*self.bytes.shape[:-1], -1)[..., : self.channels]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitHalf:
  """Packed codes of the cache, [..., ceil(C / 2)] for C channels."""

  bytes: UInt8[Array, "... n"]
  channels: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def pack(cls, codes: UInt8[Array, "... C"]) -> Self:
    """Packs codes, one a byte."""
    low, high = jnp.split(_even(codes), 2, axis=-1)
    return cls(_join(low, high), codes.shape[-1])

  def unpack(self) -> UInt8[Array, "... C"]:
    """Codes, one a byte."""
    return jnp.concatenate(_nibbles(self.bytes), axis=-1)[..., : self.channels]


def _even(codes: jax.Array) -> jax.Array:
  """Codes with a zero behind an odd number of them."""
  codes = jnp.asarray(codes)
  if codes.shape[-1] % 2:
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
  return codes


def _join(low: jax.Array, high: jax.Array) -> jax.Array:
  return (low & 15) | (high << 4)


def _nibbles(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
  packed = jnp.asarray(packed)
  return packed & 15, packed >> 4
