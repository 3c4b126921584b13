"""Matrices of the experts that are used, from plain or quantised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels.formats import Quantised

# Plain weights are [E, inputs, outputs], quantised ones as checkpoints have them: the transpose.
Weights = jax.Array | Quantised


def matrices(
  weights: Weights, experts: Int[Array, "*choices"], dtype: jnp.dtype
) -> Float[Array, "*choices I O"]:
  """The matrices of some experts; no other expert is read or decoded."""
  if isinstance(weights, Quantised):
    return weights[experts].dequantise(dtype).swapaxes(-1, -2)
  return weights[experts]
