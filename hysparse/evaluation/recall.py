"""Does the indexer find what attention would look at?

Recall of an index source: the share of the K entries with the largest attention mass, in that
layer's dense attention over all visible entries summed over heads, that the layer selects; over
valid queries that see at least 4K entries. A random selection of K among V visible entries has
recall K / V.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention, merge, oracle_top_k
from hysparse_kernels.sparse_attention import View, sparse_attention
from jaxtyping import Array

from hysparse.config import ModelConfig
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Call
from hysparse.nn.model import Model
from hysparse.training.losses import make_batch

# Queries with fewer visible entries (in multiples of K) are not counted: most entries fit anyway.
VISIBLE_PER_SELECTED = 4


def indexer_recall(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batches: Iterable[Mapping[str, np.ndarray]],
  config: ModelConfig,
) -> dict[int, dict[str, float]]:
  """Per index source: "recall", "random" (the same of a random selection) and "queries" counted.

  Compares each layer with dense attention over the same queries and entries. Exact, in key blocks;
  meant for a few held-out batches.
  """
  totals: dict[int, np.ndarray] = {}
  for arrays in batches:
    for layer, sums in _sums(graphdef, state, dict(arrays), config).items():
      totals[layer] = totals.get(layer, 0) + np.asarray(sums, np.float64)
  return {
    layer: {
      "recall": float(recall / max(count, 1)),
      "random": float(random / max(count, 1)),
      "queries": int(count),
    }
    for layer, (recall, random, count) in totals.items()
  }


@functools.partial(jax.jit, static_argnums=(0, 3))
def _sums(graphdef, state, arrays, config: ModelConfig) -> dict[int, Array]:
  model: Model = nnx.merge(graphdef, state)
  batch = make_batch(arrays)
  told = model.hidden(batch, call=Call(capture=True)).aux
  return {
    layer: _layer_sums(told.trace[layer], batch, config, config.layers[layer].ratio)
    for layer in config.layers.index_sources
  }


def oracle_rows(trace: Mapping[str, Array], batch: Batch, config: ModelConfig, ratio: int) -> Array:
  """The K entries [B, S, K] with the largest attention mass if the layer attended to all."""
  q = trace["q"]
  entries = trace["entries"].values(q.dtype)[:, :, None]
  lo, hi = batch.span(ratio)
  scale = config.head_dim**-0.5
  view = View(trace["window"], batch.positions_BxS, width=config.window)
  near = sparse_attention(q, batch.positions_BxS, view, trace["sink"], scale=scale)
  every = merge(near, dense_attention(q, entries, entries, lo, hi, scale=scale))
  return oracle_top_k(
    q, entries, lo, hi, every.lse_BxSxH, scale=scale, top_k=config.top_k, reduce="sum"
  )


def _layer_sums(trace, batch: Batch, config: ModelConfig, ratio: int) -> Array:
  """[sum of recalls, sum of random recalls, queries]."""
  K = config.top_k
  lo, hi = batch.span(ratio)
  counted = batch.valid_BxS & (hi - lo >= VISIBLE_PER_SELECTED * K)
  wanted = oracle_rows(trace, batch, config, ratio)
  # Both lists are ascending and without repeats, so a shared entry is found by binary search.
  # Places that hold no entry get numbers that meet nothing.
  rows = jnp.where(trace["ids"] < 0, jnp.iinfo(jnp.int32).max, trace["ids"])
  at = jax.vmap(jax.vmap(jnp.searchsorted))(rows, wanted)
  found = jnp.take_along_axis(rows, jnp.minimum(at, rows.shape[-1] - 1), axis=-1) == wanted
  recall = (found & (wanted >= 0)).sum(-1) / K
  random = K / jnp.maximum(hi - lo, 1)
  return jnp.stack([jnp.where(counted, x, 0.0).sum() for x in (recall, random, 1.0)])
