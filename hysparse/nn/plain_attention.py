"""Ordinary causal attention with K and V heads of its own: the baselines `mha` and `gqa/n`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention
from jaxtyping import Array, Float

from hysparse.cache.layout import Precision
from hysparse.cache.state import LayerCache, Pools
from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Kept, Published, Told
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
    source: None = None,
  ) -> tuple[Float[Array, "B S D"], Told]:
    """As `Attention`: what earlier layers published passes through."""
    c, positions = self.config, batch.positions_BxS
    freqs = rope.frequencies(c, False)
    B, S, _ = x_BxSxD.shape
    _, q = self.queries(x_BxSxD, positions, freqs)
    k, v = (w(x_BxSxD).reshape(B, S, self.kv_heads, c.head_dim) for w in (self.wk, self.wv))
    k = rope.rotate(k, positions, freqs)
    kept = stale_B = None
    if cache is None:
      stored = (self.run.store(x, Precision.plain_kv, packed=False) for x in (k, v))
      k, v = (x.decode(q.dtype) for x in stored)
    else:
      (pools,) = cache.pools
      ids, valid = positions, batch.valid_BxS
      k = self.run.append(batch.pages.of(pools.keys, 1), ids, k, valid)
      v = self.run.append(batch.pages.of(pools.values, 1), ids, v, valid)
      kept, stale_B = Kept(pools=Pools(keys=k.rows, values=v.rows)), jnp.zeros((B,), bool)
      k, v = (x.values(q.dtype, batch.entries_B(1)) for x in (k, v))
    attended = dense_attention(q, k, v, *batch.span(1), scale=self.scale, backend=self.run.backend)
    y_BxSxD = self.output(attended.out_BxSxHxC)
    trace = {"q": q, "attention": y_BxSxD}
    return y_BxSxD, Told(published, kept, stale_B, jnp.zeros((), jnp.float32), trace)
