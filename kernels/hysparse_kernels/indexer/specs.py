"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.indexer.pool import Pool
from hysparse_kernels.paged import Paged

_stored = jax.jit(Stored.of, static_argnums=1)  # op by op it takes seconds


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `before` tokens precede the call.

  Attributes:
    ties: many scores are exactly equal.
    hidden: no query sees anything.
    within: blocks of a pool to obey, drawn for each query; 0: no pool.
    page: entries in a block of a shuffled pool; 0: one block for each sequence.
    queries_in: dtype of the queries.
  """

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
  hidden: bool = False
  within: int = 0
  index_k: Format = "f32"
  page: int = 0
  queries_in: str = "float32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `select`."""
    rng = np.random.default_rng(seed)

    def values(*shape):
      x = rng.integers(-1, 2, shape) if self.ties else rng.normal(size=shape)
      return jnp.asarray(x, jnp.float32)

    length = self.before + self.queries
    positions = packed_positions(
      rng, self.batch, length, self.ratio * self.block_size, self.documents
    )
    lo, hi = (jnp.asarray(x[:, self.before :]) for x in visible_span(positions, self.ratio))
    queries = values(self.batch, self.queries, self.heads, self.dim)
    stored = _stored(values(self.batch, self._entries, self.dim), self.index_k)
    keys = shuffled(rng, stored, self.page) if self.page else Paged.contiguous(stored)
    weights = values(self.batch, self.queries, self.heads)
    pool = jnp.asarray(self._pool(rng)) if self.within else None
    hi = lo if self.hidden else hi
    return self._arrays(queries, keys, weights, lo, hi, pool) | self._numbers()

  def shapes(self) -> dict:
    """What `arguments` returns, with arrays described instead of allocated."""
    B, S, D = self.batch, self.queries, self.dim
    page = self.page or self._entries
    each = -(-self._entries // page)

    def arrays():
      spans = jnp.zeros((B, S), jnp.int32)
      rows = _stored(jnp.zeros(((B * each + bool(self.page)) * page, D)), self.index_k)
      table = jnp.zeros((B, each), jnp.int32) if self.page else None
      keys = Paged(rows, table, page)
      pool = jnp.zeros((B, S, self.within), jnp.int32) if self.within else None
      queries, weights = jnp.zeros((B, S, self.heads, D)), jnp.zeros((B, S, self.heads))
      return self._arrays(queries, keys, weights, spans, spans, pool)

    return jax.eval_shape(arrays) | self._numbers()

  @property
  def _entries(self) -> int:
    return max(1, (self.before + self.queries) // self.ratio)

  def _pool(self, rng: np.random.Generator) -> np.ndarray:
    """Blocks of a pool for each query; the last places of some are empty."""
    blocks = -(-self._entries // self.block_size)
    chosen = rng.permuted(np.tile(np.arange(blocks), (self.batch, self.queries, 1)), axis=-1)
    chosen = np.sort(chosen[..., : self.within], axis=-1).astype(np.int32)
    chosen[:, ::3, self.within // 2 :] = -1
    return chosen

  def _arrays(self, queries, keys, weights, lo, hi, pool) -> dict:
    arrays = {
      "q_BxSxIxD": queries.astype(self.queries_in),
      "keys": keys,
      "weights_BxSxI": weights,
      "lo_BxS": lo,
      "hi_BxS": hi,
    }
    if pool is not None:
      arrays["within"] = Pool(pool, self.block_size)
    return arrays

  def _numbers(self) -> dict:
    return {
      "top_k": self.top_k,
      "pool_blocks": self.pool_blocks,
      "block_size": self.block_size,
    }


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
  Spec("all_hidden", batch=2, queries=5, before=40, hidden=True),
  Spec("one_token", batch=3, queries=1, before=91),
  Spec("k_above_entries", queries=9, ratio=4, top_k=20),
  Spec("many_keys", queries=3, before=700, top_k=32, pool_blocks=8),
  Spec("released_heads", queries=8, before=120, heads=32, dim=128),
  Spec("packed", batch=2, queries=70, dim=40, ratio=2, index_k="mxfp4"),
  Spec("paged", batch=3, queries=5, before=595, index_k="fp8", page=16, top_k=20),
  Spec("paged_one_token", batch=3, queries=1, before=91, index_k="fp4", page=8),
  Spec("within", batch=2, queries=7, before=400, within=9, pool_blocks=0, ties=True),
  Spec("within_much", queries=9, before=120, within=20, pool_blocks=4, ties=True),
)

_released = functools.partial(
  Spec,
  heads=32,
  dim=128,
  top_k=512,
  pool_blocks=0,
  block_size=8,
  index_k="mxfp4",
  page=128,
  queries_in="bfloat16",
)

# Sizes of the released model: for benchmarks, and compile checks over `shapes`.
RELEASED = (
  _released("released_prefill", queries=128, before=65_536 - 128),
  _released("released_decode", batch=8, queries=1, before=65_535),
  _released("released_small_pages", batch=8, queries=1, before=65_535, page=32),
  _released("released_pool", queries=128, before=65_536 - 128, pool_blocks=2048),
  _released("released_within", queries=128, before=65_536 - 128, within=2048),
  _released("released_within_decode", batch=8, queries=1, before=262_143, within=2048),
  _released("released_long_within", queries=128, before=2**20 - 128, within=512),
)
