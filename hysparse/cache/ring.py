"""The sliding window of a layer: a ring of W rows, each tagged with its position.

A call attends to the ring as it was before the call and to its own keys, and writes afterwards; so
tokens that are rejected leave no trace.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from hysparse_kernels.formats import Stored
from jaxtyping import Array, Bool, Int

EMPTY = -1  # tag of a row that was never written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
  """Position p lives in slot p % W; an axis for the layers of a run may stand in front.

  Attributes:
    rows: [B, W, C], keys that are also the values.
    tags_BxW: position of each row, -1 for none.
  """

  rows: Stored
  tags_BxW: Int[Array, "B W"]


def recent(
  ring: Ring, length_B: Int[Array, "B"], count: int
) -> tuple[Stored, Int[Array, "B N"], Bool[Array, "B"]]:
  """The rows of the last `count` positions before `length`, oldest first, with their tags.

  A row whose tag is not the position expected there gets the tag -1, so it never takes part.

  Returns:
    Rows, tags, and whether any expected row was not there (stale, lost or overwritten).
  """
  B, W = ring.tags_BxW.shape
  positions_BxN = length_B[:, None] + jnp.arange(-count, 0)
  at = jnp.arange(B)[:, None], positions_BxN % W
  expected_BxN = (positions_BxN >= 0) & (positions_BxN >= length_B[:, None] - W)
  right_BxN = expected_BxN & (ring.tags_BxW[at] == positions_BxN)
  tags_BxN = jnp.where(right_BxN, positions_BxN, EMPTY)
  return ring.rows[at], tags_BxN, (expected_BxN & ~right_BxN).any(-1)


def write(
  ring: Ring,
  rows: Stored,
  positions_BxN: Int[Array, "B N"],
  valid_BxN: Bool[Array, "B N"],
) -> Ring:
  """Writes the valid rows [n, B, N, C] of n layers' rings.

  Positions of a sequence are consecutive; of more than W valid ones the last W stay.
  """
  B, W = ring.tags_BxW.shape[-2:]
  end_Bx1 = jnp.max(jnp.where(valid_BxN, positions_BxN, -1), axis=1, keepdims=True)
  kept_BxN = valid_BxN & (positions_BxN > end_Bx1 - W)
  slots_BxN = jnp.where(kept_BxN, positions_BxN % W, W)  # W is out of bounds: dropped
  at = slice(None), jnp.arange(B)[:, None], slots_BxN
  return Ring(
    jax.tree.map(lambda into, part: into.at[at].set(part, mode="drop"), ring.rows, rows),
    ring.tags_BxW.at[at].set(positions_BxN, mode="drop"),
  )
