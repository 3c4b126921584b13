"""Selection by a running top-k, for backends that have a kernel for the scores of a chunk.

Queries go in blocks. For each block the context passes in chunks of entries: a backend scores a
chunk, and what is best in it is merged into what was best before. [S, T] therefore never exists,
nor, in a kernel that sums over the heads itself, [chunk, heads] outside of it. Chunks that no query
of the block sees are not scored.

Equal scores go to the lower entry: what was kept stands before the chunk in the merged row and
holds lower entries only, equals in ascending order, and `lax.top_k` takes the first of equals.

Inside a pool each query is a sequence of its own to the same kernel, and the blocks of its pool are
the pages of it: the keys are read where they are. Queries then share no keys any more, so where the
context is not much larger than the pool, all of it is scored and masked instead, with equal result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels import blocks
from hysparse_kernels.indexer.pool import Pool, block_maxima
from hysparse_kernels.paged import NOWHERE, Paged
from hysparse_kernels.selection import NONE, ascending, rank, span


class ScoreChunk(Protocol):
  """What a backend supplies."""

  def __call__(
    self,
    q_BxQxIxD: Float[Array, "B Q I D"],
    keys: Paged,
    weights_BxQxI: Float[Array, "B Q I"],
    first: Int[Array, ""] | int,
    count: int,
  ) -> Float[Array, "B Q N"]:
    """Scores, float32, of the `count` entries from `first` on, of every sequence.

    Where there is no entry (beyond the context, no block in the table) anything may stand, NaN too.
    """


def select(
  q_BxSxIxD: Float[Array, "B S I D"],
  keys: Paged,
  weights_BxSxI: Float[Array, "B S I"],
  lo_BxS: Int[Array, "B S"],
  hi_BxS: Int[Array, "B S"],
  top_k: int,
  within: Pool | None,
  pool_blocks: int,
  block_size: int,
  *,
  score_chunk: ScoreChunk,
  sizes: Mapping[str, int],
  step: int = 1,
) -> tuple[Int[Array, "B S K"], Pool | None]:
  """The operation (api.py), on top of scores of chunks.

  Args:
    sizes: "queries" of a block and entries of a "chunk". Only the pool is read where the context is
      more than "pool_ratio" times as large, by blocks of "pool_queries" of all sequences together.
    step: all chunks begin at multiples of it; they are all as long, a multiple of it, if there is
      more than one.
  """
  T = keys.entries
  x = {"q": q_BxSxIxD, "weights": weights_BxSxI, "lo": lo_BxS, "hi": jnp.minimum(hi_BxS, T)}
  steps = [step, block_size if pool_blocks else 1]
  if within is not None:
    x["blocks"] = within.blocks_BxSxN
    steps.append(within.block_size)
    pooled = within.blocks_BxSxN.shape[-1] * within.block_size
  if within is not None and not pool_blocks and sizes["pool_ratio"] * pooled < T:
    block = functools.partial(
      _pooled, keys=keys, top_k=top_k, block_size=within.block_size, score_chunk=score_chunk
    )
    queries = max(1, sizes["pool_queries"] // len(lo_BxS))
  else:
    whole = math.lcm(*steps)
    block = functools.partial(
      _running,
      keys=keys,
      chunk=min(T, blocks.count(sizes["chunk"], whole) * whole),
      top_k=top_k,
      within_size=None if within is None else within.block_size,
      pool_blocks=pool_blocks,
      block_size=block_size,
      score_chunk=score_chunk,
    )
    queries = sizes["queries"]
  S = q_BxSxIxD.shape[1]
  queries = min(S, queries)
  result = jax.lax.map(block, {name: blocks.split(array, queries) for name, array in x.items()})
  result = {name: blocks.join(array, S) for name, array in result.items()}
  return result["rows"], Pool(result["pool"], block_size) if pool_blocks else None


class _Best(NamedTuple):
  """The best so far of each query, best first: scores, -inf for none, and what has them."""

  scores_BxQxK: jax.Array
  ids_BxQxK: jax.Array

  @classmethod
  def none(cls, batch: int, queries: int, count: int) -> Self:
    shape = (batch, queries, count)
    return cls(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NONE, jnp.int32))

  def merged(self, scores_BxQxN: jax.Array, first: jax.Array) -> Self:
    """With the ranked scores of the N next ids, from `first` on."""
    ids_N = first + jnp.arange(scores_BxQxN.shape[-1], dtype=jnp.int32)
    both = jnp.concatenate([self.scores_BxQxK, scores_BxQxN], axis=-1)
    ids = jnp.concatenate([self.ids_BxQxK, jnp.broadcast_to(ids_N, scores_BxQxN.shape)], axis=-1)
    best, at = jax.lax.top_k(both, self.ids_BxQxK.shape[-1])
    return _Best(best, jnp.take_along_axis(ids, at, axis=-1))

  def chosen(self) -> Int[Array, "B Q K"]:
    return ascending(self.ids_BxQxK, self.scores_BxQxK > -jnp.inf)


def _running(
  x: Mapping[str, jax.Array],
  *,
  keys: Paged,
  chunk: int,
  top_k: int,
  within_size: int | None,
  pool_blocks: int,
  block_size: int,
  score_chunk: ScoreChunk,
) -> dict[str, jax.Array]:
  """A block of queries against all chunks; a chunk of blocks is whole, or is the whole context."""
  (B, Q), T = x["lo"].shape, keys.entries
  best = {"rows": _Best.none(B, Q, min(top_k, T))}
  if pool_blocks:
    best["pool"] = _Best.none(B, Q, min(pool_blocks, blocks.count(T, block_size)))
  newest_BxQ = jnp.where(x["hi"] > x["lo"], x["hi"] - 1, NONE)

  def visit(i, best):
    first = i * chunk
    scores = score_chunk(x["q"], keys, x["weights"], first, chunk)
    ranked = rank(scores, span(x["lo"], x["hi"], first + jnp.arange(chunk)))
    merged = {}
    if pool_blocks:
      maxima = block_maxima(ranked, newest_BxQ - first, block_size)
      merged["pool"] = best["pool"].merged(maxima, first // block_size)
    if within_size is not None:
      inside = _mask(x["blocks"], within_size, first, chunk)
      ranked = jnp.where(inside, ranked, -jnp.inf)
    return merged | {"rows": best["rows"].merged(ranked, first)}

  begin = jnp.where(x["hi"] > x["lo"], x["lo"], T).min() // chunk
  best = jax.lax.fori_loop(begin, blocks.count(x["hi"].max(), chunk), visit, best)
  return {name: b.chosen() for name, b in best.items()}


def _mask(
  blocks_BxQxN: jax.Array, block_size: int, first: jax.Array, count: int
) -> Bool[Array, "B Q N"]:
  """Which of the entries from `first` on, where a block begins, are in a pool."""
  at = blocks_BxQxN - first // block_size
  here = (at >= 0) & (at < blocks.count(count, block_size)) & (blocks_BxQxN != NONE)
  return Pool(jnp.where(here, at, NONE), block_size).mask(count)


def _pooled(
  x: Mapping[str, jax.Array],
  *,
  keys: Paged,
  top_k: int,
  block_size: int,
  score_chunk: ScoreChunk,
) -> dict[str, jax.Array]:
  """A block of queries against the entries of its pool: each query is a sequence of its own."""
  ids_BxQxP = Pool(x["blocks"], block_size).entry_ids()
  B, Q, P = ids_BxQxP.shape
  alone = lambda a: a.reshape(B * Q, 1, *a.shape[2:])  # noqa: E731
  own = _blocks_as_pages(keys, x["blocks"], block_size)
  scores = score_chunk(alone(x["q"]), own, alone(x["weights"]), 0, P).reshape(B, Q, P)
  visible = (ids_BxQxP >= x["lo"][..., None]) & (ids_BxQxP < x["hi"][..., None])
  best, at = jax.lax.top_k(rank(scores, visible), min(top_k, P))
  chosen = ascending(jnp.take_along_axis(ids_BxQxP, at, axis=-1), best > -jnp.inf)
  pad = min(top_k, keys.entries) - chosen.shape[-1]
  return {"rows": jnp.pad(chosen, [(0, 0), (0, 0), (0, pad)], constant_values=NONE)}


def _blocks_as_pages(keys: Paged, blocks_BxQxN: jax.Array, block_size: int) -> Paged:
  """Pools as B * Q sequences: their entries in place, or copied where pages cut blocks."""
  B, Q, N = blocks_BxQxN.shape
  if keys.block % block_size == 0:
    first = keys.locate(jnp.where(blocks_BxQxN == NONE, NOWHERE, blocks_BxQxN * block_size))
    table = jnp.where(first == NOWHERE, NOWHERE, first // block_size)
    return Paged(keys.rows, table.reshape(B * Q, N), block_size)
  copied = keys.read_groups(blocks_BxQxN, block_size)
  together = lambda part: part.reshape(B * Q, N * block_size, -1)  # noqa: E731
  return Paged.contiguous(jax.tree.map(together, copied))
