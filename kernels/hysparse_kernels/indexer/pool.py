"""The candidate pool: for each query, the blocks of entries that later selections stay inside."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels.selection import NONE, rank, top_visible


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
  """Blocks of `block_size` entries a query may select from.

  Attributes:
    blocks_BxSxN: block numbers, ascending and different, -1 for none.
    block_size: entries in a block (static); block j holds entries j*size .. j*size + size - 1.
  """

  blocks_BxSxN: Int[Array, "B S N"]
  block_size: int = dataclasses.field(metadata={"static": True})

  def mask(self, entries: int) -> Bool[Array, "B S T"]:
    """Which of `entries` entries are in the pool."""
    n = -(-entries // self.block_size)
    blocks = jnp.where(self.blocks_BxSxN == NONE, n, self.blocks_BxSxN)
    B, S, _ = blocks.shape
    hit = jnp.zeros((B, S, n), bool)
    hit = hit.at[jnp.arange(B)[:, None, None], jnp.arange(S)[:, None], blocks].set(
      True, mode="drop"
    )
    return jnp.repeat(hit, self.block_size, axis=-1)[..., :entries]

  def entry_ids(self) -> Int[Array, "B S P"]:
    """The entries of the pool, ascending, -1 for none; P = N * block_size."""
    ids = self.blocks_BxSxN[..., None] * self.block_size + jnp.arange(self.block_size)
    ids = jnp.where(self.blocks_BxSxN[..., None] == NONE, NONE, ids)
    return ids.reshape(*ids.shape[:-2], -1)


def best_blocks(
  scores_BxSxT: Float[Array, "B S T"],
  visible_BxSxT: Bool[Array, "B S T"],
  hi_BxS: Int[Array, "B S"],
  blocks: int,
  block_size: int,
) -> Pool:
  """The `blocks` best blocks by their best visible entry.

  A block with nothing visible never counts; the block of the newest visible entry always does.

  Source: arXiv 2609.19969, section 2.3.
  """
  visible = visible_BxSxT.any(-1)
  newest_BxS = jnp.where(visible, hi_BxS - 1, NONE)
  best = block_maxima(rank(scores_BxSxT, visible_BxSxT), newest_BxS, block_size)
  return Pool(top_visible(best, best > -jnp.inf, blocks), block_size)


def block_maxima(
  ranked_BxSxT: Float[Array, "B S T"], newest_BxS: Int[Array, "B S"], block_size: int
) -> Float[Array, "B S n"]:
  """The best of each block of ranked scores (`selection.rank`), -inf for a block without one.

  The block that holds the newest visible entry has +inf. A `newest` that is not among the T
  entries, on either side, is in none of their blocks.
  """
  *rows, T = ranked_BxSxT.shape
  n = -(-T // block_size)
  pad = [(0, 0)] * len(rows) + [(0, n * block_size - T)]
  padded = jnp.pad(ranked_BxSxT, pad, constant_values=-jnp.inf)
  best = padded.reshape(*rows, n, block_size).max(-1)
  holds = jnp.arange(n) == (newest_BxS // block_size)[..., None]
  return jnp.where(holds, jnp.inf, best)
