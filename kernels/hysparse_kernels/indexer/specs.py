"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.paged import Paged


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `before` tokens precede the call, `ties` makes many scores exactly equal."""

  name: str
  batch: int = 1
  queries: int = 64
  heads: int = 4
  dim: int = 16
  ratio: int = 1
  top_k: int = 8
  pool_blocks: int = 3
  block_size: int = 4
  before: int = 0
  documents: int = 1
  ties: bool = False
  index_k: Format = "f32"
  page: int = 0  # entries in a block of a shuffled pool; 0: one block for each sequence

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `select`, without a pool to obey."""
    rng = np.random.default_rng(seed)

    def values(*shape):
      x = rng.integers(-1, 2, shape) if self.ties else rng.normal(size=shape)
      return jnp.asarray(x, jnp.float32)

    length = self.before + self.queries
    positions = packed_positions(
      rng, self.batch, length, self.ratio * self.block_size, self.documents
    )
    lo, hi = visible_span(positions, self.ratio)
    return {
      "q_BxSxIxD": values(self.batch, self.queries, self.heads, self.dim),
      "keys": self._keys(rng, values(self.batch, max(1, length // self.ratio), self.dim)),
      "weights_BxSxI": values(self.batch, self.queries, self.heads),
      "lo_BxS": jnp.asarray(lo[:, self.before :]),
      "hi_BxS": jnp.asarray(hi[:, self.before :]),
      "top_k": self.top_k,
      "pool_blocks": self.pool_blocks,
      "block_size": self.block_size,
    }

  def _keys(self, rng: np.random.Generator, keys_BxTxD: jnp.ndarray) -> Paged:
    stored = Stored.of(keys_BxTxD, self.index_k)
    return shuffled(rng, stored, self.page) if self.page else Paged.contiguous(stored)


def shuffled(rng: np.random.Generator, rows_BxT: Stored, page: int) -> Paged:
  """Rows [B, T, D] spread over a pool that has a block to spare."""
  B, T, _ = rows_BxT.shape
  each = -(-T // page)
  table = rng.permutation(B * each + 1)[: B * each].reshape(B, each).astype(np.int32)

  def spread(part):
    padded = np.zeros((B, each * page, part.shape[-1]), part.dtype)
    padded[:, :T] = part
    pool = np.full(((B * each + 1), page, part.shape[-1]), 77, part.dtype)
    pool[table] = padded.reshape(B, each, page, -1)
    return jnp.asarray(pool.reshape(-1, part.shape[-1]))

  return Paged(jax.tree.map(spread, rows_BxT), jnp.asarray(table), page)


SPECS = (
  Spec("prefill"),
  Spec("odd_sizes", batch=2, queries=67, heads=3, dim=10, ratio=2, top_k=7),
  Spec("documents", batch=2, queries=96, ratio=3, documents=3),
  Spec("ties", batch=2, queries=80, ties=True),
  Spec("one_token", batch=3, queries=1, before=91),
  Spec("k_above_entries", queries=9, ratio=4, top_k=20),
  Spec("many_keys", queries=3, before=700, top_k=32, pool_blocks=8),
  Spec("released_heads", queries=8, before=120, heads=32, dim=128),
  Spec("packed", batch=2, queries=70, dim=40, ratio=2, index_k="mxfp4"),
  Spec("paged", batch=3, queries=5, before=595, index_k="fp8", page=16, top_k=20),
  Spec("paged_one_token", batch=3, queries=1, before=91, index_k="fp4", page=8),
)
