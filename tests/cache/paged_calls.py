"""Calls of a small model on a paged cache, few tokens at a time, and what the cache then means.

All tests here share one schedule and one width of call, so that few programs are compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import small

from hysparse.cache.allocate import allocate
from hysparse.cache.blocks import BlockPool
from hysparse.cache.state import Cache
from hysparse.config import Config
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Output
from hysparse.nn.model import forward

SEQUENCES, ROOM, POOL = 3, 40, 64  # tokens of one sequence at most, and of the pool

DRAFTS = {
  "draft_layers": 2,
  "draft_block": 3,
  "draft_noise_id": 5,
  "draft_target_layers": (0, 1),
  "draft_markov_rank": 8,
}
# All kinds of state, packed; a call may be longer than the window.
CFG = small.config(
  "swa full/4",
  window=3,
  engram_layers=(1,),
  engram_max_ngram=5,
  train={"numerics": "kvquant"},
  **DRAFTS,
)
WIDTH = 4
BLOCK = 2 * CFG.model.alignment  # tokens; two entries, so that a begun block may hold one

compiled = jax.jit(forward, static_argnums=0, static_argnames=("all_positions", "defer"))


def fresh(cfg: Config = CFG, pool_tokens: int = POOL) -> tuple[Cache, BlockPool]:
  """An empty cache whose sequences have no blocks yet."""
  cache = allocate(
    cfg, SEQUENCES, ROOM, pool_tokens=pool_tokens, block_tokens=2 * cfg.model.alignment
  )
  return cache, BlockPool(cache)


def reserved(cache: Cache, pool: BlockPool, tokens: list[int]) -> Cache:
  """The cache with blocks for so many tokens of each sequence."""
  for slot, count in enumerate(tokens):
    pool.reserve(slot, count)
  return pool.install(cache)


def call(cache: Cache, tokens_BxS, counts_B, *, cfg: Config = CFG, defer: bool = False) -> Output:
  """One call that continues every sequence by its first `counts` tokens; logits of all."""
  batch = Batch.of(jnp.asarray(tokens_BxS, jnp.int32), jnp.asarray(counts_B))
  return compiled(*small.model(cfg), batch, cache, all_positions=True, defer=defer)


def fed(
  cache: Cache, texts: list[np.ndarray], *, cfg: Config = CFG, width: int = WIDTH
) -> tuple[list[np.ndarray], Cache]:
  """(logits [tokens, V] of each sequence, the cache) after as many calls as it takes."""
  logits = [[] for _ in texts]
  for first in range(0, max(map(len, texts)), width):
    pieces = [text[first : first + width] for text in texts]
    padded = np.stack([np.pad(piece, (0, width - len(piece))) for piece in pieces])
    output = call(cache, padded, [len(piece) for piece in pieces], cfg=cfg)
    cache = output.cache
    for own, piece, row in zip(logits, pieces, output.logits_BxNxV, strict=True):
      own.append(np.asarray(row[: len(piece)]))
  return [np.concatenate(own) for own in logits], cache


def text(length: int, seed: int) -> np.ndarray:
  """Random tokens."""
  return np.random.default_rng(seed).integers(0, CFG.model.vocab_size, length)
