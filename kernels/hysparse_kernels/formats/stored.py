"""Rows of channels as a format of the precision dial holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hysparse_kernels.formats.packing import SplitHalf
from hysparse_kernels.formats.quantisers import (
  QUANTISERS,
  Format,
  dequantise_blocks,
  quantise_blocks,
)

_PLAIN = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
  """Rows [..., C], packed or plain. A pytree: gather and reshape its leading axes with tree.map.

  Attributes:
    parts: "codes" and "scales" (uint8, [..., bytes] each), or "values" [..., C].
    format: of the dial, or "plain": values that are used as they are (static).
    channels: C (static).
  """

  parts: Mapping[str, Array]
  format: Format | Literal["plain"] = dataclasses.field(metadata={"static": True})
  channels: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, x: Float[Array, "... C"], format: Format) -> Self:
    """Quantises and packs; E2M1 codes lie in split halves.

    `Stored.of(x, format).decode()` equals `fake_quant(x, format)` bit for bit.
    """
    if format in _PLAIN:
      return cls({"values": x.astype(_PLAIN[format])}, format, x.shape[-1])
    blocks = quantise_blocks(x, format)
    parts = {"codes": _packed(blocks.codes, format), "scales": blocks.scales}
    return cls(parts, format, x.shape[-1])

  @classmethod
  def plain(cls, x: Float[Array, "... C"]) -> Self:
    """Rows as they are, differentiable."""
    return cls({"values": x}, "plain", x.shape[-1])

  def decode(self, dtype: jnp.dtype = jnp.float32) -> Float[Array, "... C"]:
    """The values."""
    if "values" in self.parts:
      return self.parts["values"].astype(dtype)
    codes = self.parts["codes"]
    if QUANTISERS[self.format].element.sign_bit < 16:
      codes = SplitHalf(codes, self.channels).unpack()
    return dequantise_blocks(codes, self.parts["scales"], self.format, dtype)

  def with_gradient(self, gradient: Float[Array, "... C"]) -> Self:
    """The cotangent of these rows, for a custom gradient; packed ones are constant."""
    if "values" not in self.parts:
      return jax.tree.map(lambda part: np.zeros(part.shape, jax.dtypes.float0), self)
    return dataclasses.replace(self, parts={"values": gradient.astype(self.parts["values"].dtype)})

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the values."""
    return (*next(iter(self.parts.values())).shape[:-1], self.channels)

  def __getitem__(self, index) -> Self:
    """Rows by their leading axes."""
    return jax.tree.map(lambda part: part[index], self)


def _packed(codes: jax.Array, format: Format) -> jax.Array:
  if QUANTISERS[format].element.sign_bit < 16:
    return SplitHalf.pack(codes).bytes
  return codes
