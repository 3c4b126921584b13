"""The probability that each selected entry got, from the softmax denominator alone.

For kernels, which return `out` and `lse` only: training of the indexer is all that asks for the
mass, and under jit this loop is left out where nobody does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import blocks
from hysparse_kernels.sparse_attention import xla
from hysparse_kernels.sparse_attention.view import View


def selection_mass(
  q_BxSxHxC: Float[Array, "B S H C"],
  positions_BxS: Int[Array, "B S"],
  view: View,
  lse_BxSxH: Float[Array, "B S H"],
  scale: float,
) -> Float[Array, "B S K"] | None:
  """What `Attended.mass_BxSxK` is, without gradient; None for a window-only layer.

  Memory grows with a block of queries x K, as in the xla backend.

  Args:
    lse_BxSxH: of the same call.
  """
  if view.rows_BxSxK is None:
    return None
  inputs = jax.lax.stop_gradient((q_BxSxHxC, positions_BxS, view, lse_BxSxH))
  q_BxSxHxC, positions_BxS, view, lse_BxSxH = inputs
  length, size = q_BxSxHxC.shape[1], xla.block_size(q_BxSxHxC, view)

  def block(x):
    scores_BxQxHxK, _ = xla.selected_scores(x, view, scale)
    return jnp.exp(scores_BxQxHxK - x["lse"][..., None]).sum(2)

  xs = xla.inputs(q_BxSxHxC, positions_BxS, view, size)
  xs["lse"] = blocks.split(lse_BxSxH, size, fill=jnp.inf)
  return blocks.join(jax.lax.map(block, xs), length)
