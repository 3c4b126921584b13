"""The plain definition: all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer.pool import Pool, best_blocks
from hysparse_kernels.indexer.scores import weighted
from hysparse_kernels.paged import Paged
from hysparse_kernels.selection import span, top_visible


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
  T = keys.entries
  k_BxTxD = keys.read(jnp.arange(T)).decode(q_BxSxIxD.dtype)
  dots_BxSxIxT = einsum("bsid,btd->bsit", q_BxSxIxD, k_BxTxD)
  scores_BxSxT = weighted(dots_BxSxIxT, weights_BxSxI, released_rounding)
  visible_BxSxT = span(lo_BxS, hi_BxS, jnp.arange(T))
  pool = None
  if pool_blocks:
    pool = best_blocks(scores_BxSxT, visible_BxSxT, hi_BxS, pool_blocks, block_size)
  if within is not None:
    visible_BxSxT &= within.mask(T)
  return top_visible(scores_BxSxT, visible_BxSxT, top_k), pool


def score_rows(
  q_BxSxIxD: jax.Array, keys: Stored, weights_BxSxI: jax.Array, rows_BxSxK: jax.Array
) -> jax.Array:
  k_BxSxKxD = keys[jnp.maximum(rows_BxSxK, 0)].decode(q_BxSxIxD.dtype)
  dots_BxSxIxK = einsum("bsid,bskd->bsik", q_BxSxIxD, k_BxSxKxD)
  return weighted(dots_BxSxIxK, weights_BxSxI)
