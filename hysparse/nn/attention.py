"""HySparse attention: a sliding window and, by the layer's mode, a global branch.

`swa` has the window only. `full` computes entries and keys and selects; `reindex` selects among the
last source's; `reuse` attends to the last selection; `dense` attends to all its entries and
publishes the selection that its own probabilities make.

With a cache a call continues each sequence: the window is the ring before the call and the call's
own keys, a source appends what the call completes and publishes all its entries. Rings and
unfinished groups are written when the call is over (cache/settle.py).

Source: arXiv 2609.19969, sections 2.2 and 2.3; `dense` follows arXiv 2602.03560.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention, merge, oracle_top_k
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import select
from hysparse_kernels.paged import Paged
from hysparse_kernels.sparse_attention import View, sparse_attention
from jaxtyping import Array, Float, Int

from hysparse.cache import groups, ring
from hysparse.cache.state import LayerCache, Pools
from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.batch import Batch
from hysparse.nn.compressor import Compressor
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Kept, Published, Told
from hysparse.nn.indexer import IndexKeys, IndexQueries, indexer_loss
from hysparse.nn.latent import LatentAttention
from hysparse.schedule import LayerSpec


@dataclasses.dataclass(frozen=True)
class Source:
  """What a source makes its entries of: the inputs of all tokens of a call."""

  x_BxSxD: Float[Array, "B S D"]
  batch: Batch


class Attention(LatentAttention):
  """One layer's attention; see the module docstring."""

  def __init__(self, config: ModelConfig, spec: LayerSpec, run: Execution, *, rngs: nnx.Rngs):
    super().__init__(config, run, rngs=rngs)
    self.spec = spec
    if spec.is_source:
      self.compressor = Compressor(config, spec.ratio, rngs=rngs)
    if spec.owns_index_keys:
      self.index_keys = IndexKeys(config, rngs=rngs)
    if spec.has_indexer:
      self.indexer = IndexQueries(config, run, rngs=rngs)

  def __call__(
    self,
    x_BxSxD: Float[Array, "B S D"],
    batch: Batch,
    published: Published,
    cache: LayerCache | None = None,
    source: Source | None = None,
  ) -> tuple[Float[Array, "B S D"], Told]:
    """The result and what goes with it: keys for later layers, the new cache, loss, trace.

    Args:
      cache: of this layer alone (no axis for the layers of a run).
      source: what a source makes its entries of; by default `x` and `batch`.
    """
    c, spec, packed = self.config, self.spec, cache is not None
    freqs = rope.frequencies(c, spec.mode != "swa")
    positions = batch.positions_BxS

    qr, q_BxSxHxC = self.queries(x_BxSxD, positions, freqs)
    window = self.window_keys(x_BxSxD, positions, freqs, packed=packed)
    view, stale_B = self._view(window, batch, cache)

    kept = Kept()
    if spec.is_source:
      published, kept = self.publish(source or Source(x_BxSxD, batch), cache)
    has_entries = published.entries is not None
    index = None
    if spec.has_indexer and has_entries:
      index = self.indexer(x_BxSxD, qr, positions)
      published = self._publish_selection(index, batch, published)

    if spec.is_sparse and has_entries:
      view = dataclasses.replace(
        view, entries=published.entries.rows, rows_BxSxK=published.rows_BxSxK
      )
    options = {"scale": self.scale, "backend": self.run.backend}
    attended = sparse_attention(q_BxSxHxC, positions, view, self.sink[...], **options)
    if spec.mode == "dense" and has_entries:
      count_B = batch.entries_B(spec.ratio)
      entries = published.entries.values(q_BxSxHxC.dtype, count_B)[:, :, None]
      lo, hi = batch.span(spec.ratio)
      every = dense_attention(q_BxSxHxC, entries, entries, lo, hi, **options)
      attended = merge(attended, every)
      ids = oracle_top_k(
        *jax.lax.stop_gradient((q_BxSxHxC, entries)), lo, hi,
        jax.lax.stop_gradient(attended.lse_BxSxH), top_k=c.top_k, **options,
      )  # fmt: skip
      published = published.selecting(ids, published.pool)

    loss = jnp.zeros((), jnp.float32)
    if index is not None and not packed:  # a cache is for inference
      loss = indexer_loss(
        index[0], published.index_keys.rows, index[1], published.rows_BxSxK,
        attended.mass_BxSxK, batch.valid_BxS, backend=self.run.backend,
      )  # fmt: skip
    y_BxSxD = self.project(attended, positions, freqs)
    trace = {"q": q_BxSxHxC, "window": window, "sink": self.sink[...], "attention": y_BxSxD}
    trace |= {"entries": published.entries, "index_keys": published.index_keys}
    trace |= {"ids": published.ids_BxSxK, "pool": published.pool, "index": index}
    kept = dataclasses.replace(kept, window=window) if packed else None
    return y_BxSxD, Told(published, kept, stale_B, loss, trace)

  def _view(self, own: Stored, batch: Batch, cache: LayerCache | None) -> tuple[View, Array | None]:
    """The ring before the call, then the call's own keys; and whether a row was not there."""
    c, positions = self.config, batch.positions_BxS
    if cache is None:
      return View(own, positions, width=c.window), None
    past, tags, stale_B = ring.recent(cache.window, batch.length_B, c.window - 1)
    view = View(
      window=jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), past, own),
      tags_BxP=jnp.concatenate([tags, jnp.where(batch.valid_BxS, positions, ring.EMPTY)], axis=1),
      width=c.window,
    )
    return view, jnp.zeros_like(stale_B) if batch.gap else stale_B

  def publish(self, source: Source, cache: LayerCache | None) -> tuple[Published, Kept]:
    """A source's entries and keys; nothing while there is no room for a single group."""
    ratio, batch = self.spec.ratio, source.batch
    if cache is None:
      latent_BxTxC = self.compressor(source.x_BxSxD)
      T = latent_BxTxC.shape[1]
      if T == 0:
        return Published(), Kept()
      entries, keys = self._entries(latent_BxTxC, batch.positions_BxS[:, ::ratio][:, :T])
      entries = Paged.contiguous(self.run.store(entries, self.config.main_kv, packed=False))
      if keys is not None:
        keys = Paged.contiguous(self.run.store(keys, self.config.index_k, packed=False))
      return Published(entries, keys), Kept()
    call = None
    if ratio == 1:
      ids, done = batch.positions_BxS, batch.valid_BxS
      latent_BxTxC = self.compressor(source.x_BxSxD)
    else:
      call = groups.PartialGroup(*self.compressor.contributions(source.x_BxSxD))
      grouped = groups.complete(cache.partial, call, batch.length_B, batch.count_B, ratio)
      ids, done = grouped.ids_BxN, grouped.done_BxN
      latent_BxTxC = self.compressor.pool(
        grouped.kv_BxNxRxC, grouped.score_BxNxRxC, source.x_BxSxD.dtype
      )
    entries, keys = self._entries(latent_BxTxC, ids * ratio)
    (pools,) = cache.pools
    entries = self.run.append(batch.pages.of(pools.main_kv, ratio), ids, entries, done)
    if keys is not None:
      keys = self.run.append(batch.pages.of(pools.index_keys, ratio), ids, keys, done)
    pools = Pools(main_kv=entries.rows, index_keys=keys and keys.rows)
    return Published(entries, keys), Kept(group=call, pools=pools)

  def _entries(
    self, latent_BxTxC: Float[Array, "B T C"], positions_BxT: Int[Array, "B T"]
  ) -> tuple[Float[Array, "B T C"], Float[Array, "B T D"] | None]:
    """Entries and indexer keys of latents, at the position of each group's first token."""
    entries = rope.rotate(latent_BxTxC, positions_BxT, rope.frequencies(self.config, True))
    if not self.spec.owns_index_keys:
      return entries, None
    return entries, self.index_keys(latent_BxTxC, positions_BxT)

  def _publish_selection(self, index: tuple, batch: Batch, published: Published) -> Published:
    c, role = self.config, self.spec.candidate_role
    q_BxSxIxD, weights_BxSxI = index
    chosen = select(
      q_BxSxIxD,
      published.index_keys,
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
    return published.selecting(chosen.rows_BxSxK, pool)
