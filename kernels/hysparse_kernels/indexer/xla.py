"""Portable backend: query blocks; scores exist for one block of queries at a time.

Inside a block the keys are scored in blocks too, so that [queries, heads, keys] stays in cache and
[S, T, heads] never exists. With a pool, a block either gathers the pool's keys (when the context is
several times larger, so that the cost does not grow with it) or scores everything and masks; the
rule is static and the result the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hysparse_kernels import blocks, tuning
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer.pool import Pool, best_blocks
from hysparse_kernels.indexer.scores import weighted
from hysparse_kernels.paged import Paged
from hysparse_kernels.selection import ascending, rank, span, top_visible


def select(
  q_BxSxIxD: jax.Array,
  keys: Paged,
  weights_BxSxI: jax.Array,
  lo_BxS: jax.Array,
  hi_BxS: jax.Array,
  top_k: int,
  within: Pool | None,
  pool_blocks: int,
  block_size: int,
  released_rounding: bool,
) -> tuple[jax.Array, Pool | None]:
  B, S = q_BxSxIxD.shape[:2]
  T = keys.entries
  pool_size = 0 if within is None else within.blocks_BxSxN.shape[-1] * within.block_size
  sizes = _sizes(S)
  # Queries that gather share no decoded keys: an entry costs more than one that all queries score.
  gather = within is not None and not pool_blocks and sizes["pool_ratio"] * pool_size <= T
  width = pool_size if gather else T
  size = max(1, min(S, sizes["queries"], sizes["scores"] // max(1, B * width)))

  def block(x):
    if gather:
      pool = Pool(x["blocks"], within.block_size)
      ids_BxQxP = pool.entry_ids()
      scores = _pool_scores(x["q"], keys, x["weights"], pool, released_rounding)
      visible = (ids_BxQxP >= x["lo"][..., None]) & (ids_BxQxP < x["hi"][..., None])
      best, at = jax.lax.top_k(rank(scores, visible), min(top_k, width))
      rows = jnp.take_along_axis(ids_BxQxP, at, axis=-1)
      return {"rows": _pad(ascending(rows, best > -jnp.inf), min(top_k, T))}
    scores = _all_scores(x["q"], keys, x["weights"], x["lo"], x["hi"], released_rounding)
    visible = span(x["lo"], x["hi"], jnp.arange(T))
    result = {}
    if pool_blocks:
      pool = best_blocks(scores, visible, x["hi"], pool_blocks, block_size)
      result["pool"] = pool.blocks_BxSxN
    if within is not None:
      visible &= Pool(x["blocks"], within.block_size).mask(T)
    return result | {"rows": top_visible(scores, visible, top_k)}

  xs = {"q": q_BxSxIxD, "weights": weights_BxSxI, "lo": lo_BxS, "hi": hi_BxS}
  if within is not None:
    xs["blocks"] = within.blocks_BxSxN
  result = jax.lax.map(block, {name: blocks.split(x, size) for name, x in xs.items()})
  result = {name: blocks.join(x, S) for name, x in result.items()}
  return result["rows"], Pool(result["pool"], block_size) if pool_blocks else None


def _sizes(queries: int) -> Mapping[str, int]:
  """Entries scored at once ("keys"), queries of a block, and elements of two of its arrays: its
  scores [B, queries, T], and the keys that it gathers."""
  return tuning.sizes("indexer", "xla", queries=queries)


def _all_scores(q_BxQxIxD, keys: Paged, weights_BxQxI, lo, hi, released_rounding) -> jax.Array:
  """[B, Q, T], one key block after another; 0 in blocks where no query sees anything."""
  B, Q = q_BxQxIxD.shape[:2]
  T = keys.entries
  size = min(_sizes(Q)["keys"], T)

  def score(i, scores):
    keys_BxNxD = keys.read(i * size + jnp.arange(size)).decode(q_BxQxIxD.dtype)
    dots = einsum("bqid,bnd->bqin", q_BxQxIxD, keys_BxNxD)
    # Fused with what follows, XLA on CPU computes the product far slower.
    block = weighted(jax.lax.optimization_barrier(dots), weights_BxQxI, released_rounding)
    return jax.lax.dynamic_update_slice_in_dim(scores, block, i * size, axis=2)

  scores = jnp.zeros((B, Q, blocks.count(T, size) * size), jnp.float32)
  last = blocks.count(jnp.minimum(hi.max(), T), size)
  return jax.lax.fori_loop(lo.min() // size, last, score, scores)[..., :T]


def _pool_scores(q_BxQxIxD, keys: Paged, weights_BxQxI, pool: Pool, released_rounding):
  """[B, Q, P], so many blocks of so many queries at a time as `_sizes` has room for."""
  B, Q, N = pool.blocks_BxSxN.shape
  gathered = _sizes(Q)["gathered"]
  most = max(1, gathered // (B * pool.block_size * keys.rows.shape[-1]))  # blocks
  width, size = min(most, N), max(1, most // N)

  def score(x):
    def chunk(blocks_BxQxN):
      # Fused with what follows, XLA on CPU waits for memory at every block, and computes the
      # product far slower: hence both barriers.
      packed = jax.lax.optimization_barrier(keys.read_groups(blocks_BxQxN, pool.block_size))
      gathered = packed.decode(x["q"].dtype)
      keys_BxQxPxD = gathered.reshape(*x["q"].shape[:2], -1, gathered.shape[-1])
      dots = jax.lax.optimization_barrier(einsum("bqid,bqpd->bqpi", x["q"], keys_BxQxPxD))
      return weighted(dots, x["weights"], released_rounding, axis=3)

    chunks = blocks.split(x["blocks"].swapaxes(1, 2), width).swapaxes(2, 3)
    scores = jax.lax.map(chunk, chunks)  # [chunks, B, queries, width * block_size]
    return jnp.moveaxis(scores, 0, 2).reshape(*x["q"].shape[:2], -1)

  xs = {"q": q_BxQxIxD, "weights": weights_BxQxI, "blocks": pool.blocks_BxSxN}
  scores = jax.lax.map(score, {name: blocks.split(x, size) for name, x in xs.items()})
  return blocks.join(scores, Q)[..., : N * pool.block_size]


def _pad(rows: jax.Array, width: int) -> jax.Array:
  """Fills up with -1: a pool smaller than K selects fewer entries."""
  missing = width - rows.shape[-1]
  return jnp.pad(rows, ((0, 0), (0, 0), (0, missing)), constant_values=-1) if missing > 0 else rows


@jax.custom_vjp
def score_rows(
  q_BxSxIxD: jax.Array, keys: Stored, weights_BxSxI: jax.Array, rows_BxSxK: jax.Array
) -> jax.Array:
  return _score_forward(q_BxSxIxD, keys, weights_BxSxI, rows_BxSxK)[0]


def _row_blocks(q, weights, rows, **more) -> dict[str, jax.Array]:
  B, S, K = rows.shape
  sizes = _sizes(S)
  size = max(1, min(S, sizes["queries"], sizes["gathered"] // max(1, B * K * q.shape[-1])))
  xs = {"q": q, "weights": weights, "rows": jnp.maximum(rows, 0)} | more
  return {name: blocks.split(x, size) for name, x in xs.items()}


def _score_forward(q, keys: Stored, weights, rows):
  def block(x):
    chosen = keys[x["rows"]].decode(q.dtype)
    return weighted(einsum("bqid,bqkd->bqik", x["q"], chosen), x["weights"])

  scores = jax.lax.map(block, _row_blocks(q, weights, rows))
  return blocks.join(scores, q.shape[1]), (q, keys, weights, rows)


def _score_backward(saved, d_scores):
  q, keys, weights, rows = saved

  def block(d_k, x):
    chosen = keys[x["rows"]].decode(q.dtype)
    dots = einsum("bqid,bqkd->bqik", x["q"], chosen)
    d_weights = (x["d_scores"][:, :, None] * jax.nn.relu(dots)).sum(-1)
    d_dots = jnp.where(dots > 0, x["weights"][..., None] * x["d_scores"][:, :, None], 0.0)
    d_q = einsum("bqik,bqkd->bqid", d_dots, chosen)
    d_chosen = einsum("bqik,bqid->bqkd", d_dots, x["q"])
    return d_k.at[x["rows"]].add(d_chosen), (d_q, d_weights)

  xs = _row_blocks(q, weights, rows, d_scores=jnp.where(rows >= 0, d_scores, 0.0))
  d_k, (d_q, d_weights) = jax.lax.scan(block, jnp.zeros(keys.shape, jnp.float32), xs)
  d_q, d_weights = (blocks.join(x, q.shape[1]) for x in (d_q, d_weights))
  return d_q.astype(q.dtype), keys.with_gradient(d_k), d_weights.astype(weights.dtype), None


score_rows.defvjp(_score_forward, _score_backward)
