"""The sliding window of one layer: a ring of W rows, each tagged with its position.

A call attends to the ring as it was before the call and to its own keys, and writes afterwards; so
a call whose tokens are rejected can be undone by keeping the old ring.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EMPTY = -1  # tag of a row that was never written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
  """Position p lives in slot p % W; leading axes (layers of a run) may stand in front.

  Attributes:
    rows_BxWxC: keys, which are also the values.
    tags_BxW: position of each row, -1 for none.
  """

  rows_BxWxC: Float[Array, "B W C"]
  tags_BxW: Int[Array, "B W"]


def recent(
  ring: Ring, length_B: Int[Array, "B"], count: int
) -> tuple[Float[Array, "B N C"], Int[Array, "B N"], Bool[Array, "B"]]:
  """The rows of the last `count` positions before `length`, oldest first, with their tags.

  A row whose tag is not the position expected there gets the tag -1, so it never takes part.

  Returns:
    Rows, tags, and whether any expected row was not there (stale, lost or overwritten).
  """
  W = ring.tags_BxW.shape[-1]
  positions_BxN = length_B[:, None] + jnp.arange(-count, 0)
  slots_BxN = positions_BxN % W
  rows = jnp.take_along_axis(ring.rows_BxWxC, slots_BxN[..., None], axis=1)
  found_BxN = jnp.take_along_axis(ring.tags_BxW, slots_BxN, axis=1)
  expected_BxN = (positions_BxN >= 0) & (positions_BxN >= length_B[:, None] - W)
  right_BxN = expected_BxN & (found_BxN == positions_BxN)
  return rows, jnp.where(right_BxN, positions_BxN, EMPTY), (expected_BxN & ~right_BxN).any(-1)


def write(
  ring: Ring,
  rows_BxSxC: Float[Array, "B S C"],
  positions_BxS: Int[Array, "B S"],
  valid_BxS: Bool[Array, "B S"],
) -> Ring:
  """Writes the last W valid rows of a call; positions of a row of the batch are consecutive."""
  B, W = ring.tags_BxW.shape
  end_Bx1 = jnp.max(jnp.where(valid_BxS, positions_BxS, -1), axis=1, keepdims=True)
  kept_BxS = valid_BxS & (positions_BxS > end_Bx1 - W)
  slots_BxS = jnp.where(kept_BxS, positions_BxS % W, W)  # W is out of bounds: dropped
  batch = jnp.arange(B)[:, None]
  return Ring(
    ring.rows_BxWxC.at[batch, slots_BxS].set(rows_BxSxC.astype(ring.rows_BxWxC.dtype), mode="drop"),
    ring.tags_BxW.at[batch, slots_BxS].set(positions_BxS, mode="drop"),
  )
