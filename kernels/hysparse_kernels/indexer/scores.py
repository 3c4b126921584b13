"""From the dot products of one entry with all heads to its score."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hysparse_kernels.formats import round_to


def weighted(
  dots: Float[Array, "B S I N"] | Float[Array, "B S N I"],
  weights: Float[Array, "B S I"],
  released_rounding: bool = False,
  axis: int = 2,
) -> Float[Array, "B S N"]:
  """sum_i weight_i * relu(dot_i), float32; the heads are `axis` of the dots.

  `released_rounding` rounds to bfloat16 where the released code does: the dots, each product and
  the sum (which itself is wide).
  """
  rounded = (lambda x: round_to(x, jnp.bfloat16)) if released_rounding else (lambda x: x)
  # Head by head: on CPUs a sum over the axis is fused into the product, which then is far slower.
  heads = (jax.lax.index_in_dim(dots, i, axis, keepdims=False) for i in range(dots.shape[axis]))
  products = (
    rounded(weights[:, :, i, None] * jax.nn.relu(rounded(head))) for i, head in enumerate(heads)
  )
  return rounded(sum(products, start=jnp.float32(0)))
