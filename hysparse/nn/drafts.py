"""DSpark: a few layers that draft the next tokens from the backbone's streams.

Source: arXiv 2609.19969, section 3, and the released code.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Stored
from hysparse_kernels.paged import Paged
from hysparse_kernels.sparse_attention import View, sparse_attention
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache import ring
from hysparse.config import ModelConfig
from hysparse.nn import init, rope
from hysparse.nn.batch import Batch
from hysparse.nn.block import Block, Carry, Inputs
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Published, Told
from hysparse.nn.latent import LatentAttention
from hysparse.nn.linear import Linear, RMSNorm
from hysparse.schedule import LayerSpec


class DraftAttention(LatentAttention):
  """Every draft position sees the ring of past tokens and the whole block, in both directions."""

  def __init__(self, config: ModelConfig, spec: LayerSpec, run: Execution, *, rngs: nnx.Rngs):
    del spec  # draft layers are all alike
    super().__init__(config, run, rngs=rngs)

  def __call__(
    self,
    x_BxNxD: Float[Array, "B N D"],
    batch: Batch,
    past: Published,
    cache: None = None,
    source: None = None,
  ) -> tuple[Float[Array, "B N D"], Told]:
    """
    Args:
      past: the ring's rows as entries, and which of them hold a token (ids [B, 1, W], -1: none).
    """
    positions, freqs = batch.positions_BxS, rope.frequencies(self.config, False)
    _, q_BxNxHxC = self.queries(x_BxNxD, positions, freqs)
    keys = self.window_keys(x_BxNxD, positions, freqs, packed=True)
    B, N, _ = keys.shape
    W = past.entries.entries
    ids_BxNxW = jnp.broadcast_to(past.ids_BxSxK, (B, N, W))
    block_BxNxN = jnp.broadcast_to(W + jnp.arange(N), (B, N, N))
    joined = jax.tree.map(
      lambda past, own: jnp.concatenate([past.reshape(B, W, -1), own], axis=1),
      past.entries.rows, keys,
    )  # fmt: skip
    entries = Paged.contiguous(joined)
    view = View(
      window=keys,
      tags_BxP=jnp.full((B, N), ring.EMPTY),  # no causal window: the block's keys are entries
      entries=entries.rows,
      rows_BxSxK=entries.locate(jnp.concatenate([ids_BxNxW, block_BxNxN], axis=2)),
    )
    attended = sparse_attention(
      q_BxNxHxC, positions, view, self.sink[...], scale=self.scale, backend=self.run.backend
    )
    y_BxNxD = self.project(attended, positions, freqs)
    return y_BxNxD, Told(past, None, None, jnp.zeros((), jnp.float32), {"attention": y_BxNxD})


class Markov(nnx.Module):
  """Logits that each token adds to those of the next position, through a low rank."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    shape = (config.vocab_size, config.draft_markov_rank)
    self.embed = nnx.Param(init.table(rngs.params(), shape, init.EMBEDDING_STD))
    self.head = nnx.Param(init.table(rngs.params(), shape, init.HEAD_STD * shape[1] ** -0.5))


class Drafts(nnx.Module):
  """The draft layers, stacked, and what stands before and behind them."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.run = config, run
    D, targets = config.d_model, len(config.draft_target_layers)
    self.main_proj = Linear(targets * D, D, rngs=rngs, fp8_input=run.official)
    self.main_norm = RMSNorm(D, config.norm_eps)
    own = layer_config(config)
    keys = jax.random.split(rngs.params(), config.draft_layers)
    self.layers = nnx.vmap(
      lambda key: Block(own, 0, run, rngs=nnx.Rngs(params=key), attention=DraftAttention)
    )(keys)
    self.norm = RMSNorm(D, config.norm_eps)
    self.markov = Markov(config, rngs=rngs)
    self.confidence = Linear(D + config.draft_markov_rank, 1, rngs=rngs)

  def keys(self, main_BxNxTD: Float[Array, "B N TD"], positions_BxN: Int[Array, "B N"]) -> Stored:
    """Keys [L, B, N, C] of tokens that the backbone has consumed, for every draft layer's ring.

    Args:
      main_BxNxTD: means over the streams that entered the target layers, side by side.
    """
    x_BxNxD = self.main_norm(self.main_proj(main_BxNxTD))
    graphdef, states = nnx.split(self.layers)
    freqs = rope.frequencies(self.config, False)

    def layer(state: nnx.State) -> Stored:
      attn = nnx.merge(graphdef, state).attn
      return attn.window_keys(x_BxNxD, positions_BxN, freqs, packed=True)

    return jax.lax.map(layer, states)

  def run_block(
    self, rings: ring.Ring, carry: Carry, length_B: Int[Array, "B"]
  ) -> tuple[Carry, Bool[Array, "B"]]:
    """Streams of a block at positions length .. length + N - 1; whether a ring row was missing."""
    graphdef, states = nnx.split(self.layers)
    B, N = carry.x_BxSxMxD.shape[:2]
    batch = Batch.of(jnp.zeros((B, N), jnp.int32))
    positions_BxN = length_B[:, None] + jnp.arange(N)
    batch = dataclasses.replace(batch, positions_BxS=positions_BxN)
    W = self.config.window

    def layer(carry: Carry, xs: tuple[ring.Ring, nnx.State]) -> tuple[Carry, jax.Array]:
      layer_ring, state = xs
      rows, tags_BxW, stale_B = ring.recent(layer_ring, length_B, W)
      places = jnp.where(tags_BxW >= 0, jnp.arange(W), -1)[:, None]
      past = Published(entries=Paged.contiguous(rows), ids_BxSxK=places)
      return nnx.merge(graphdef, state)(carry, Inputs(batch, None), past).carry, stale_B

    carry, stale_LxB = jax.lax.scan(layer, carry, (rings, states))
    return carry, stale_LxB.any(0)

  def decide(
    self,
    x_BxNxD: Float[Array, "B N D"],
    logits_BxNxV: Float[Array, "B N V"],
    anchor_B: Int[Array, "B"],
  ) -> tuple[Int[Array, "B N+1"], Float[Array, "B N V"], Float[Array, "B N"]]:
    """Greedy tokens one after another, each biased by the one before it.

    Args:
      x_BxNxD: folded streams before the final norm.
      logits_BxNxV: the backbone head's logits of them.

    Returns:
      The anchor and the drafts, the biased logits, and a confidence (raw logit) for each.
    """
    embed_VxR, head_VxR = (
      w.get_value().astype(jnp.float32) for w in (self.markov.embed, self.markov.head)
    )

    def one(token_B, xs):
      x_BxD, logits_BxV = xs
      known_BxR = embed_VxR[token_B]
      logits_BxV = logits_BxV + einsum("br,vr->bv", known_BxR, head_VxR)
      joined = jnp.concatenate([x_BxD.astype(jnp.float32), known_BxR], axis=-1)
      following_B = logits_BxV.argmax(-1).astype(jnp.int32)
      return following_B, (following_B, logits_BxV, self.confidence(joined)[:, 0])

    first = lambda x: jnp.moveaxis(x, 1, 0)  # noqa: E731
    _, (ids, logits, confidence) = jax.lax.scan(
      one, anchor_B, (first(x_BxNxD), first(logits_BxNxV))
    )
    ids_BxN = jnp.concatenate([anchor_B[None], ids]).T
    return ids_BxN, jnp.moveaxis(logits, 0, 1), confidence.T


def layer_config(config: ModelConfig) -> ModelConfig:
  """The config of a draft layer: a window only, experts of its own number, text tokens only."""
  return dataclasses.replace(
    config,
    schedule="swa" if config.draft_layers == 1 else f"swa*{config.draft_layers}",
    engram_layers=(),
    draft_layers=0,
    n_experts=config.draft_experts or config.n_experts,
    experts_per_token=config.draft_experts_per_token or config.experts_per_token,
    experts_per_prompt_token=0,
  )
