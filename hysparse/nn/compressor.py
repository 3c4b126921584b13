"""Compresses r consecutive tokens into one latent entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn.linear import Linear, RMSNorm


class Compressor(nnx.Module):
  """Latents of complete groups, before RoPE and quantisation.

  r = 1 projects each token. r > 1 pools a group by a softmax over its tokens for every channel,
  in float32. A group that is not complete yields nothing.

  Source: arXiv 2609.19969, section 2.2.
  """

  def __init__(self, config: ModelConfig, ratio: int, *, rngs: nnx.Rngs):
    self.ratio = ratio
    self.wkv = Linear(config.d_model, config.head_dim, rngs=rngs)
    if ratio > 1:
      self.wgate = Linear(config.d_model, config.head_dim, rngs=rngs)
    self.norm = RMSNorm(config.head_dim, config.norm_eps)

  def __call__(self, x_BxSxD: Float[Array, "B S D"]) -> Float[Array, "B T C"]:
    """Latents of a row whose groups begin at multiples of r."""
    if self.ratio == 1:
      return self.norm(self.wkv(x_BxSxD))
    B, S, _ = x_BxSxD.shape
    T = S // self.ratio
    kv, score = (
      y.reshape(B, T, self.ratio, y.shape[-1])
      for y in self.contributions(x_BxSxD[:, : T * self.ratio])
    )
    return self.pool(kv, score, x_BxSxD.dtype)

  def contributions(
    self, x_BxSxD: Float[Array, "B S D"]
  ) -> tuple[Float[Array, "B S C"], Float[Array, "B S C"]]:
    """(key-value, score) of each token, float32; for r > 1."""
    wide = x_BxSxD.astype(jnp.float32)
    return self.wkv(wide), self.wgate(wide)

  def pool(
    self,
    kv_BxTxRxC: Float[Array, "B T r C"],
    score_BxTxRxC: Float[Array, "B T r C"],
    dtype: jnp.dtype,
  ) -> Float[Array, "B T C"]:
    """Latents of groups from the contributions of their tokens."""
    pooled_BxTxC = (kv_BxTxRxC * jax.nn.softmax(score_BxTxRxC, axis=2)).sum(2)
    return self.norm(pooled_BxTxC.astype(dtype))
