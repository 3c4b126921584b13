"""HySparse attention: a sliding window and, by the layer's mode, a global branch.

`swa` has the window only. `full` computes entries and keys and selects; `reindex` selects among the
last source's; `reuse` attends to the last selection; `dense` attends to all its entries and
publishes the selection that its own probabilities make.

With a cache a call continues each sequence: the window is the ring before the call and the call's
own keys, a source appends what the call completes and publishes all its entries.

Source: arXiv 2609.19969, sections 2.2 and 2.3; `dense` follows arXiv 2602.03560.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention, merge, oracle_top_k
from hysparse_kernels.formats import fake_quant
from hysparse_kernels.indexer import select
from hysparse_kernels.sparse_attention import View, sparse_attention
from jaxtyping import Array, Float, Int

from hysparse.cache import groups, ring
from hysparse.cache.state import LayerCache, append
from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.batch import Batch
from hysparse.nn.compressor import Compressor
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Published, Told
from hysparse.nn.indexer import IndexKeys, IndexQueries, indexer_loss
from hysparse.nn.latent import LatentAttention
from hysparse.schedule import LayerSpec


class Attention(LatentAttention):
  """One layer's attention; see the module docstring."""

  def __init__(self, config: ModelConfig, spec: LayerSpec, run: Execution, *, rngs: nnx.Rngs):
    super().__init__(config, run, rngs=rngs)
    self.spec = spec
    if spec.is_source:
      self.compressor = Compressor(config, spec.ratio, rngs=rngs)
    if spec.owns_index_keys:
      self.index_keys = IndexKeys(config, run, rngs=rngs)
    if spec.has_indexer:
      self.indexer = IndexQueries(config, run, rngs=rngs)

  def __call__(
    self,
    x_BxSxD: Float[Array, "B S D"],
    batch: Batch,
    published: Published,
    cache: LayerCache | None = None,
  ) -> tuple[Float[Array, "B S D"], Told]:
    """The result and what goes with it: keys for later layers, the new cache, loss, trace."""
    c, spec = self.config, self.spec
    freqs = rope.frequencies(c, spec.mode != "swa")
    positions = batch.positions_BxS

    qr, q_BxSxHxC = self.queries(x_BxSxD, positions, freqs)
    keys_BxSxC = self.window_keys(x_BxSxD, positions, freqs)
    view, cache, stale_B = self._window(keys_BxSxC, batch, cache)

    if spec.is_source:
      published, cache = self._publish_entries(x_BxSxD, batch, cache)
    has_entries = published.entries_BxTxC is not None
    index = None
    if spec.has_indexer and has_entries:
      index = self.indexer(x_BxSxD, qr, positions)
      published = self._publish_selection(index, batch, published)

    if spec.is_sparse and has_entries:
      view = dataclasses.replace(
        view,
        entries_BxTxC=published.entries_BxTxC.astype(q_BxSxHxC.dtype),
        rows_BxSxK=published.rows_BxSxK,
      )
    options = {"scale": self.scale, "backend": self.run.backend}
    attended = sparse_attention(q_BxSxHxC, positions, view, self.sink[...], **options)
    if spec.mode == "dense" and has_entries:
      entries = published.entries_BxTxC[:, :, None].astype(q_BxSxHxC.dtype)
      lo, hi = batch.span(spec.ratio)
      every = dense_attention(q_BxSxHxC, entries, entries, lo, hi, **options)
      attended = merge(attended, every)
      rows = oracle_top_k(
        *jax.lax.stop_gradient((q_BxSxHxC, entries)), lo, hi,
        jax.lax.stop_gradient(attended.lse_BxSxH), top_k=c.top_k, **options,
      )  # fmt: skip
      published = dataclasses.replace(published, rows_BxSxK=rows)

    loss = jnp.zeros((), jnp.float32)
    if index is not None and cache is None:  # a cache is for inference
      loss = indexer_loss(
        index[0], published.index_keys_BxTxD, index[1], published.rows_BxSxK,
        attended.mass_BxSxK, batch.valid_BxS, backend=self.run.backend,
      )  # fmt: skip
    y_BxSxD = self.project(attended, positions, freqs)
    trace = {"q": q_BxSxHxC, "window": keys_BxSxC, "sink": self.sink[...], "attention": y_BxSxD}
    trace |= {"entries": published.entries_BxTxC, "index_keys": published.index_keys_BxTxD}
    trace |= {"rows": published.rows_BxSxK, "pool": published.pool, "index": index}
    return y_BxSxD, Told(published, cache, stale_B, loss, trace)

  def _window(
    self, keys_BxSxC: Float[Array, "B S C"], batch: Batch, cache: LayerCache | None
  ) -> tuple[View, LayerCache | None, Array | None]:
    """The ring before the call, then the call's own keys; and the ring after the call."""
    c, positions = self.config, batch.positions_BxS
    if cache is None:
      return View(keys_BxSxC, positions, window=c.window), None, None
    past, tags, stale_B = ring.recent(cache.ring, batch.length_B, c.window - 1)
    view = View(
      jnp.concatenate([past.astype(keys_BxSxC.dtype), keys_BxSxC], axis=1),
      jnp.concatenate([tags, positions], axis=1),
      window=c.window,
    )
    after = ring.write(cache.ring, keys_BxSxC, positions, batch.valid_BxS)
    return view, dataclasses.replace(cache, ring=after), stale_B

  def _publish_entries(
    self, x_BxSxD: Float[Array, "B S D"], batch: Batch, cache: LayerCache | None
  ) -> tuple[Published, LayerCache | None]:
    """A source's entries and keys; nothing while there is no room for a single group."""
    ratio = self.spec.ratio
    if cache is None:
      latent_BxTxC = self.compressor(x_BxSxD)
      T = latent_BxTxC.shape[1]
      if T == 0:
        return Published(), None
      return Published(*self._entries(latent_BxTxC, batch.positions_BxS[:, ::ratio][:, :T])), None
    if cache.entries_BxTxC.shape[1] == 0:
      return Published(), cache
    if ratio == 1:
      ids, done = batch.positions_BxS, batch.valid_BxS
      latent_BxTxC = self.compressor(x_BxSxD)
    else:
      grouped, left = groups.advance(
        cache.partial, *self.compressor.contributions(x_BxSxD), batch.length_B, batch.count_B, ratio
      )
      ids, done = grouped.ids_BxN, grouped.done_BxN
      latent_BxTxC = self.compressor.pool(grouped.kv_BxNxRxC, grouped.score_BxNxRxC, x_BxSxD.dtype)
      cache = dataclasses.replace(cache, partial=left)
    entries, keys = self._entries(latent_BxTxC, ids * ratio)
    cache = dataclasses.replace(
      cache, entries_BxTxC=append(cache.entries_BxTxC, entries, ids, done)
    )
    if keys is not None:
      cache = dataclasses.replace(
        cache, index_keys_BxTxD=append(cache.index_keys_BxTxD, keys, ids, done)
      )
    return Published(cache.entries_BxTxC, cache.index_keys_BxTxD), cache

  def _entries(
    self, latent_BxTxC: Float[Array, "B T C"], positions_BxT: Int[Array, "B T"]
  ) -> tuple[Float[Array, "B T C"], Float[Array, "B T D"] | None]:
    """Entries and indexer keys of latents, at the position of each group's first token."""
    entries = rope.rotate(latent_BxTxC, positions_BxT, rope.frequencies(self.config, True))
    entries = fake_quant(entries, self.run.stored(self.config.main_kv))
    owns = self.spec.owns_index_keys
    return entries, self.index_keys(latent_BxTxC, positions_BxT) if owns else None

  def _publish_selection(self, index: tuple, batch: Batch, published: Published) -> Published:
    c, role = self.config, self.spec.candidate_role
    q_BxSxIxD, weights_BxSxI = index
    chosen = select(
      q_BxSxIxD,
      published.index_keys_BxTxD.astype(q_BxSxIxD.dtype),
      weights_BxSxI,
      *batch.span(self.spec.ratio),
      top_k=c.top_k,
      within=published.pool if role == "pool" else None,
      pool_blocks=c.candidate_blocks if role == "source" else 0,
      block_size=c.candidate_block_size,
      released_rounding=self.run.official,
      backend=self.run.backend,
    )
    pool = chosen.pool if role == "source" else published.pool
    return dataclasses.replace(published, rows_BxSxK=chosen.rows_BxSxK, pool=pool)
