"""How a model is computed, as opposed to what it computes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from hysparse.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Execution:
  """Choices that change speed and memory, never the function (but for rounding).

  Attributes:
    compute_dtype: of activations and of the matrices as they are used; parameters stay float32.
    backend: of the operations in `hysparse_kernels`.
    remat: "layer" recomputes each layer in the backward pass.
    scan_layers: scan runs of equal layers (compiles faster) instead of unrolling them.
  """

  compute_dtype: Literal["bfloat16", "float32"] = "float32"
  backend: str = "auto"
  remat: Literal["none", "layer"] = "none"
  scan_layers: bool = True

  @classmethod
  def of(cls, train: TrainConfig) -> Execution:
    return cls(train.compute_dtype, train.backend, train.remat, train.scan_layers)

  @property
  def dtype(self) -> jnp.dtype:
    return jnp.dtype(self.compute_dtype)
