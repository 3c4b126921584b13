"""The weights of all experts in the forms that `moe` takes, and the matrices of those it uses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels.formats import Quantised


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Separate:
  """Plain weights with an array for each expert: one is read where it is, without being copied.

  A slice of a stack that is chosen at run time is copied by XLA before a product reads it, which
  for a few rows costs as much as the product. For inference: there is no gradient.

  Attributes:
    experts: E matrices [inputs, outputs].
  """

  experts: tuple[Float[Array, "I O"], ...]

  @classmethod
  def of(cls, stacked_ExIxO: Float[Array, "E I O"]) -> Separate:
    """Copies the matrices out of their stack."""
    return cls(tuple(stacked_ExIxO[e] for e in range(stacked_ExIxO.shape[0])))

  @property
  def shape(self) -> tuple[int, ...]:
    return (len(self.experts), *self.experts[0].shape)

  def stacked(self) -> Float[Array, "E I O"]:
    """As one array, a copy."""
    return jnp.stack(self.experts)


# Plain weights are [E, inputs, outputs], quantised ones as checkpoints have them: the transpose.
Weights = jax.Array | Quantised | Separate


def matrices(
  weights: Weights, experts: Int[Array, "*choices"], dtype: jnp.dtype
) -> Float[Array, "*choices I O"]:
  """The matrices of some experts; no other expert is decoded."""
  return turned(weights, decoded(weights, experts, dtype))


def decoded(
  weights: Weights, experts: Int[Array, "*choices"], dtype: jnp.dtype
) -> Float[Array, "*choices I O"] | Float[Array, "*choices O I"]:
  """The matrices of some experts, the way round that they are stored."""
  if isinstance(weights, Quantised):
    return weights[experts].dequantise(dtype)
  if isinstance(weights, Separate):
    weights = weights.stacked()
  return weights[experts].astype(dtype)


def turned(weights: Weights, stored: Float[Array, "..."]) -> Float[Array, "*choices I O"]:
  """[inputs, outputs] of what is stored as `weights` are."""
  return stored.swapaxes(-1, -2) if isinstance(weights, Quantised) else stored
