"""From the dot products of one entry with all heads to its score."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hysparse_kernels.formats import round_to


def weighted(
  dots: Float[Array, "B S I N"], weights: Float[Array, "B S I"], released_rounding: bool = False
) -> Float[Array, "B S N"]:
  """sum_i weight_i * relu(dot_i), float32.

  `released_rounding` rounds to bfloat16 where the released code does: the dots, each product and
  the sum (which itself is wide).
  """
  rounded = (lambda x: round_to(x, jnp.bfloat16)) if released_rounding else (lambda x: x)
  # Head by head: on CPUs a sum over the axis is fused into the product, which then is far slower.
  heads = range(dots.shape[2])
  products = (rounded(weights[:, :, i, None] * jax.nn.relu(rounded(dots[:, :, i]))) for i in heads)
  return rounded(sum(products, start=jnp.float32(0)))
