"""HySparse attention: a sliding window and, by the layer's mode, a global branch.

`swa` has the window only. `full` computes entries and keys and selects; `reindex` selects among the
last source's; `reuse` attends to the last selection; `dense` attends to all its entries and
publishes the selection that its own probabilities make.

Source: arXiv 2609.19969, sections 2.2 and 2.3; `dense` follows arXiv 2602.03560.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention, merge, oracle_top_k
from hysparse_kernels.indexer import select
from hysparse_kernels.sparse_attention import View, sparse_attention
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.batch import Batch
from hysparse.nn.compressor import Compressor
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Published
from hysparse.nn.indexer import IndexKeys, IndexQueries, indexer_loss
from hysparse.nn.linear import Linear, RMSNorm
from hysparse.nn.output import GroupedOutput
from hysparse.schedule import LayerSpec


class Attention(nnx.Module):
  """One layer's attention; see the module docstring."""

  def __init__(self, config: ModelConfig, spec: LayerSpec, run: Execution, *, rngs: nnx.Rngs):
    c = config
    self.config, self.spec, self.run = config, spec, run
    self.wq_a = Linear(c.d_model, c.q_rank, rngs=rngs)
    self.q_norm = RMSNorm(c.q_rank, c.norm_eps)
    self.wq_b = Linear(c.q_rank, c.n_heads * c.head_dim, rngs=rngs)
    self.wkv = Linear(c.d_model, c.head_dim, rngs=rngs)
    self.kv_norm = RMSNorm(c.head_dim, c.norm_eps)
    self.sink = nnx.Param(jnp.zeros((c.n_heads,), jnp.float32))
    self.output = GroupedOutput(config, rngs=rngs)
    if spec.is_source:
      self.compressor = Compressor(config, spec.ratio, rngs=rngs)
    if spec.owns_index_keys:
      self.index_keys = IndexKeys(config, rngs=rngs)
    if spec.has_indexer:
      self.indexer = IndexQueries(config, rngs=rngs)

  def __call__(
    self, x_BxSxD: Float[Array, "B S D"], batch: Batch, published: Published
  ) -> tuple[Float[Array, "B S D"], Published, Float[Array, ""], dict]:
    """(result, what later layers read, indexer loss, trace)."""
    c, spec = self.config, self.spec
    freqs = rope.frequencies(c, spec.mode != "swa")
    B, S, _ = x_BxSxD.shape
    positions = batch.positions_BxS

    qr = self.q_norm(self.wq_a(x_BxSxD))
    q_BxSxHxC = self.wq_b(qr).reshape(B, S, c.n_heads, c.head_dim)
    q_BxSxHxC = rope.rotate(q_BxSxHxC, positions, freqs)
    window_BxSxC = rope.rotate(self.kv_norm(self.wkv(x_BxSxD)), positions, freqs)

    if spec.is_source:
      published = self._publish_entries(x_BxSxD, batch)
    index = None
    if spec.has_indexer and published.entries_BxTxC is not None:
      index = self.indexer(x_BxSxD, qr, positions)
      published = self._publish_selection(index, batch, published)

    view = View(window_BxPxC=window_BxSxC, tags_BxP=positions, window=c.window)
    if spec.is_sparse and published.entries_BxTxC is not None:
      view = dataclasses.replace(
        view, entries_BxTxC=published.entries_BxTxC, rows_BxSxK=published.rows_BxSxK
      )
    options = {"scale": c.head_dim**-0.5, "backend": self.run.backend}
    attended = sparse_attention(q_BxSxHxC, positions, view, self.sink[...], **options)
    if spec.mode == "dense" and published.entries_BxTxC is not None:
      entries = published.entries_BxTxC[:, :, None]
      lo, hi = batch.span(spec.ratio)
      every = dense_attention(q_BxSxHxC, entries, entries, lo, hi, **options)
      attended = merge(attended, every)
      rows = oracle_top_k(
        *jax.lax.stop_gradient((q_BxSxHxC, entries)), lo, hi,
        jax.lax.stop_gradient(attended.lse_BxSxH), top_k=c.top_k, **options,
      )  # fmt: skip
      published = dataclasses.replace(published, rows_BxSxK=rows)

    loss = jnp.zeros((), jnp.float32)
    if index is not None:
      loss = indexer_loss(
        index[0], published.index_keys_BxTxD, index[1], published.rows_BxSxK,
        attended.mass_BxSxK, batch.valid_BxS, backend=self.run.backend,
      )  # fmt: skip
    out_BxSxHxC = rope.rotate(attended.out_BxSxHxC, positions, freqs, inverse=True)
    trace = {"q": q_BxSxHxC, "window": window_BxSxC, "sink": self.sink[...]}
    trace |= {"entries": published.entries_BxTxC, "rows": published.rows_BxSxK}
    return self.output(out_BxSxHxC), published, loss, trace

  def _publish_entries(self, x_BxSxD: Float[Array, "B S D"], batch: Batch) -> Published:
    """A source's entries and keys; nothing while the call is shorter than one group."""
    latent_BxTxC = self.compressor(x_BxSxD)
    T = latent_BxTxC.shape[1]
    if T == 0:
      return Published()
    first = batch.positions_BxS[:, :: self.spec.ratio][:, :T]
    freqs = rope.frequencies(self.config, True)
    return Published(
      entries_BxTxC=rope.rotate(latent_BxTxC, first, freqs),
      index_keys_BxTxD=(
        self.index_keys(latent_BxTxC, first) if self.spec.owns_index_keys else None
      ),
    )

  def _publish_selection(self, index: tuple, batch: Batch, published: Published) -> Published:
    c, role = self.config, self.spec.candidate_role
    q_BxSxIxD, weights_BxSxI = index
    chosen = select(
      q_BxSxIxD,
      published.index_keys_BxTxD,
      weights_BxSxI,
      *batch.span(self.spec.ratio),
      top_k=c.top_k,
      within=published.pool if role == "pool" else None,
      pool_blocks=c.candidate_blocks if role == "source" else 0,
      block_size=c.candidate_block_size,
      backend=self.run.backend,
    )
    pool = chosen.pool if role == "source" else published.pool
    return dataclasses.replace(published, rows_BxSxK=chosen.rows_BxSxK, pool=pool)
