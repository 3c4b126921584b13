"""Ordinary causal attention with K and V heads of its own: the baselines `mha` and `gqa/n`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention
from jaxtyping import Array, Float

from hysparse.cache.state import LayerCache, append
from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Published, Told
from hysparse.nn.latent import LowRankQueries
from hysparse.nn.linear import Linear
from hysparse.nn.output import GroupedOutput
from hysparse.schedule import LayerSpec


class PlainAttention(LowRankQueries):
  """Queries and output as in HySparse; no latent, no window, no sink, no YaRN."""

  def __init__(self, config: ModelConfig, spec: LayerSpec, run: Execution, *, rngs: nnx.Rngs):
    super().__init__(config, run, rngs=rngs)
    c = config
    self.kv_heads = spec.kv_heads or c.n_heads
    self.wk = Linear(c.d_model, self.kv_heads * c.head_dim, rngs=rngs)
    self.wv = Linear(c.d_model, self.kv_heads * c.head_dim, rngs=rngs)
    self.output = GroupedOutput(config, run, rngs=rngs)

  def __call__(
    self,
    x_BxSxD: Float[Array, "B S D"],
    batch: Batch,
    published: Published,
    cache: LayerCache | None = None,
  ) -> tuple[Float[Array, "B S D"], Told]:
    """As `Attention`: what earlier layers published passes through."""
    c, positions = self.config, batch.positions_BxS
    freqs = rope.frequencies(c, False)
    B, S, _ = x_BxSxD.shape
    _, q = self.queries(x_BxSxD, positions, freqs)
    k, v = (w(x_BxSxD).reshape(B, S, self.kv_heads, c.head_dim) for w in (self.wk, self.wv))
    k = rope.rotate(k, positions, freqs)
    if cache is not None:
      cache = dataclasses.replace(
        cache,
        keys_BxTxHxC=append(cache.keys_BxTxHxC, k, positions, batch.valid_BxS),
        values_BxTxHxC=append(cache.values_BxTxHxC, v, positions, batch.valid_BxS),
      )
      k, v = (x.astype(q.dtype) for x in (cache.keys_BxTxHxC, cache.values_BxTxHxC))
    attended = dense_attention(q, k, v, *batch.span(1), scale=self.scale, backend=self.run.backend)
    y_BxSxD = self.output(attended.out_BxSxHxC)
    stale_B = None if cache is None else jnp.zeros((B,), bool)
    trace = {"q": q, "attention": y_BxSxD}
    return y_BxSxD, Told(published, cache, stale_B, jnp.zeros((), jnp.float32), trace)
