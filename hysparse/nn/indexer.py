"""Indexer keys, queries, and the loss that trains them.

The report describes no loss for the indexer. Ours: the layer's own attention to the entries it
selected, summed over heads and normalised, is the target of the indexer's softmax over the same
entries. Everything that enters the indexer is detached, so the loss moves the indexer alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import score_rows
from jaxtyping import Array, Bool, Float, Int

from hysparse.config import ModelConfig
from hysparse.nn import rope
from hysparse.nn.execution import Execution
from hysparse.nn.linear import Linear, RMSNorm

_NO_ENTRY = -1e30  # the logit of a place without an entry; finite, so that its gradient is zero


class IndexKeys(nnx.Module):
  """Small keys of a source's entries, from its latents before RoPE."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.wk = Linear(config.head_dim, config.index_dim, rngs=rngs)
    self.k_norm = RMSNorm(config.index_dim, config.norm_eps)

  def __call__(
    self, latent_BxTxC: Float[Array, "B T C"], positions_BxT: Int[Array, "B T"]
  ) -> Float[Array, "B T D"]:
    """Keys at the position of each group's first token, unrounded. The latents get no gradient."""
    keys = self.k_norm(self.wk(jax.lax.stop_gradient(latent_BxTxC)))
    return rope.rotate(keys, positions_BxT, rope.frequencies(self.config, True))


class IndexQueries(nnx.Module):
  """Queries and head weights that score a source's keys.

  Source: arXiv 2609.19969, section 2.3.
  """

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.run = config, run
    width = config.index_heads * config.index_dim
    self.wq_b = Linear(config.q_rank, width, rngs=rngs, fp8_input=run.official)
    self.weights_proj = Linear(config.d_model, config.index_heads, rngs=rngs)

  def __call__(
    self,
    x_BxSxD: Float[Array, "B S D"],
    qr_BxSxQ: Float[Array, "B S Q"],
    positions_BxS: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S I D"], Float[Array, "B S I"]]:
    """(rotated queries, head weights with the scale in them); the inputs get no gradient."""
    c = self.config
    x_BxSxD, qr_BxSxQ = jax.lax.stop_gradient((x_BxSxD, qr_BxSxQ))
    q = self.wq_b(qr_BxSxQ).reshape(*qr_BxSxQ.shape[:2], c.index_heads, c.index_dim)
    q = rope.rotate(q, positions_BxS, rope.frequencies(c, True))
    q = self.run.store(q, c.index_k, packed=False).decode(q.dtype)
    weights = self.weights_proj(x_BxSxD if self.run.official else x_BxSxD.astype(jnp.float32))
    return q, weights * (c.index_dim**-0.5 * c.index_heads**-0.5)


def indexer_loss(
  q_BxSxIxD: Float[Array, "B S I D"],
  keys: Stored,
  weights_BxSxI: Float[Array, "B S I"],
  rows_BxSxK: Int[Array, "B S K"],
  mass_BxSxK: Float[Array, "B S K"],
  valid_BxS: Bool[Array, "B S"],
  *,
  backend: str = "auto",
) -> Float[Array, ""]:
  """KL from the attention over the selected entries to the indexer's softmax over them, in nats.

  The mean over the valid queries that selected at least two entries (with one there is nothing to
  learn).

  Args:
    keys: of the source's entries, [R, D].
    rows_BxSxK: the rows selected, -1 for none.
    mass_BxSxK: attention probability of each selected entry, summed over heads, detached.
  """
  chosen = rows_BxSxK >= 0
  scores = score_rows(q_BxSxIxD, keys, weights_BxSxI, rows_BxSxK, backend=backend)
  log_p = jax.nn.log_softmax(jnp.where(chosen, scores, _NO_ENTRY), axis=-1)
  mass = jnp.where(chosen, mass_BxSxK, 0.0)
  target = mass / jnp.maximum(mass.sum(-1, keepdims=True), 1e-20)
  log_target = jnp.log(jnp.where(target > 0, target, 1.0))
  kl_BxS = jnp.where(target > 0, target * (log_target - log_p), 0.0).sum(-1)
  counted = valid_BxS & (chosen.sum(-1) > 1)
  return jnp.where(counted, kl_BxS, 0.0).sum() / jnp.maximum(counted.sum(), 1)
