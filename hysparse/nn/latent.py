"""Latent attention without its global branch: what every HySparse and draft layer has.

Queries come through a low rank, one latent per token is key and value for all heads, and a learned
sink per head joins the softmax.

Source: arXiv 2609.19969, section 2.2.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.formats import Stored
from hysparse_kernels.sparse_attention import Attended
from jaxtyping import Array, Float, Int

from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.execution import Execution
from hysparse.nn.linear import Linear, RMSNorm
from hysparse.nn.output import GroupedOutput


class LowRankQueries(nnx.Module):
  """The queries of every attention module, plain ones included."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    c, fp8 = config, run.official
    self.config, self.run = config, run
    self.wq_a = Linear(c.d_model, c.q_rank, rngs=rngs, fp8_input=fp8)
    self.q_norm = RMSNorm(c.q_rank, c.norm_eps)
    self.wq_b = Linear(c.q_rank, c.n_heads * c.head_dim, rngs=rngs, fp8_input=fp8)

  @property
  def scale(self) -> float:
    return self.config.head_dim**-0.5

  def queries(
    self, x_BxSxD: Float[Array, "B S D"], positions_BxS: Int[Array, "B S"], freqs: np.ndarray
  ) -> tuple[Float[Array, "B S Q"], Float[Array, "B S H C"]]:
    """(normed low-rank query, rotated queries of all heads)."""
    qr = self.q_norm(self.wq_a(x_BxSxD))
    q_BxSxHxC = self.wq_b(qr).reshape(*x_BxSxD.shape[:2], self.config.n_heads, -1)
    return qr, rope.rotate(q_BxSxHxC, positions_BxS, freqs)


class LatentAttention(LowRankQueries):
  """Projections in and out; subclasses say which keys are attended to."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    super().__init__(config, run, rngs=rngs)
    c = config
    self.wkv = Linear(c.d_model, c.head_dim, rngs=rngs, fp8_input=run.official)
    self.kv_norm = RMSNorm(c.head_dim, c.norm_eps)
    self.sink = nnx.Param(jnp.zeros((c.n_heads,), jnp.float32))
    self.output = GroupedOutput(config, run, rngs=rngs)

  def window_keys(
    self,
    x_BxSxD: Float[Array, "B S D"],
    positions_BxS: Int[Array, "B S"],
    freqs: np.ndarray,
    *,
    packed: bool,
  ) -> Stored:
    """Keys [B, S, C] of the tokens' own window, as they are stored."""
    keys = rope.rotate(self.kv_norm(self.wkv(x_BxSxD)), positions_BxS, freqs)
    return self.run.store(keys, self.config.window_kv, packed=packed)

  def project(
    self, attended: Attended, positions_BxS: Int[Array, "B S"], freqs: np.ndarray
  ) -> Float[Array, "B S D"]:
    """The layer's result: values carry their rotation, so the query's is taken back first."""
    out_BxSxHxC = rope.rotate(attended.out_BxSxHxC, positions_BxS, freqs, inverse=True)
    return self.output(out_BxSxHxC)
