"""How a model is computed, as opposed to what it computes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from hysparse_kernels import fp4
from hysparse_kernels.formats import Stored, fake_quant
from hysparse_kernels.paged import Paged
from jaxtyping import Array, Bool, Float, Int

from hysparse.config import Format, TrainConfig


@dataclasses.dataclass(frozen=True)
class Execution:
  """Choices that change speed, memory and rounding.

  Attributes:
    compute_dtype: of activations and of the matrices as they are used; parameters stay float32.
    backend: of the operations in `hysparse_kernels`.
    remat: "layer" recomputes each layer in the backward pass.
    scan_layers: scan runs of equal layers (compiles faster) instead of unrolling them.
    numerics: "exact" rounds nothing beyond the compute dtype. "kvquant" rounds what a cache holds
      to the formats of the config's precision dial. "official" also rounds where the released
      code does: bfloat16 activations, FP8 inputs of the matrices that are stored quantised.
    stacked: the parameters of a run of layers are stacked on axis 0; else each layer has its own
      arrays and nothing is scanned (unstack.py).
  """

  compute_dtype: Literal["bfloat16", "float32"] = "float32"
  backend: str = "auto"
  remat: Literal["none", "layer"] = "none"
  scan_layers: bool = True
  numerics: Literal["exact", "kvquant", "official"] = "exact"
  stacked: bool = True

  @classmethod
  def of(cls, train: TrainConfig) -> Execution:
    return cls(train.compute_dtype, train.backend, train.remat, train.scan_layers, train.numerics)

  @property
  def official(self) -> bool:
    return self.numerics == "official"

  @property
  def dtype(self) -> jnp.dtype:
    return jnp.dtype("bfloat16" if self.official else self.compute_dtype)

  def store(self, x: Float[Array, "... C"], format: Format, *, packed: bool) -> Stored:
    """Rows as the cache holds them, in a format of the dial; under "exact" nothing is rounded.

    Args:
      packed: for a cache. Else the same values in their own dtype, differentiable.
    """
    format = "f32" if self.numerics == "exact" else format
    if packed:
      return fp4.pack(x, format, backend=self.backend)
    return Stored.plain(fake_quant(x, format))

  def append(
    self,
    pool: Paged,
    ids_BxN: Int[Array, "B N"],
    x: Float[Array, "B N ... C"],
    valid_BxN: Bool[Array, "B N"],
  ) -> Paged:
    """A cache's pool with the valid ones of these rows, in its format, as entries `ids`."""
    return fp4.append(pool, ids_BxN, x, valid_BxN, backend=self.backend)
