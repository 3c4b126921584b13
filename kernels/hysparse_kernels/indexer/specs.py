"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span


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
      "k_BxTxD": values(self.batch, max(1, length // self.ratio), self.dim),
      "weights_BxSxI": values(self.batch, self.queries, self.heads),
      "lo_BxS": jnp.asarray(lo[:, self.before :]),
      "hi_BxS": jnp.asarray(hi[:, self.before :]),
      "top_k": self.top_k,
      "pool_blocks": self.pool_blocks,
      "block_size": self.block_size,
    }


SPECS = (
  Spec("prefill"),
  Spec("odd_sizes", batch=2, queries=67, heads=3, dim=10, ratio=2, top_k=7),
  Spec("documents", batch=2, queries=96, ratio=3, documents=3),
  Spec("ties", batch=2, queries=80, ties=True),
  Spec("one_token", batch=3, queries=1, before=91),
  Spec("k_above_entries", queries=9, ratio=4, top_k=20),
  Spec("many_keys", queries=3, before=700, top_k=32, pool_blocks=8),
  Spec("released_heads", queries=8, before=120, heads=32, dim=128),
)
