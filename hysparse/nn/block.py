"""One layer: n-gram memory where scheduled, attention, experts, all around the residual streams."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from hysparse.config import ModelConfig
from hysparse.nn.attention import Attention
from hysparse.nn.batch import Batch
from hysparse.nn.engram import Engram
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import LayerAux, Published
from hysparse.nn.linear import RMSNorm
from hysparse.nn.moe import MoE
from hysparse.nn.plain_attention import PlainAttention
from hysparse.nn.streams import Streams
from hysparse.schedule import PLAIN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
  """What every layer of a call reads and none changes."""

  batch: Batch
  compressed_BxS: Int[Array, "B S"] | None  # compressed token ids, if the model has Engram
  pad_id: Int[Array, ""] | None  # compressed id of missing history


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
  """What a layer changes: the streams and the fold that its first sublayer uses."""

  x_BxSxMxD: Float[Array, "B S M D"]
  pre_BxSxM: Float[Array, "B S M"]


class Block(nnx.Module):
  """Layer `layer` of the schedule; equal layers share one graph and differ in parameters only."""

  def __init__(self, config: ModelConfig, layer: int, run: Execution, *, rngs: nnx.Rngs):
    spec = config.layers[layer]
    if spec.engram:
      self.engram = Engram(config, layer, run, rngs=rngs)
    self.hc_attn = Streams(config, run, rngs=rngs)
    self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
    attention = PlainAttention if spec.mode in PLAIN else Attention
    self.attn = attention(config, spec, run, rngs=rngs)
    self.hc_ffn = Streams(config, run, rngs=rngs)
    self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
    self.ffn = MoE(config, run, rngs=rngs)

  def __call__(
    self, carry: Carry, inputs: Inputs, published: Published, *, capture: bool = False
  ) -> tuple[Carry, Published, LayerAux]:
    """`capture` also returns what the layer read and chose (for evaluation, not for training)."""
    x, batch = carry.x_BxSxMxD, inputs.batch
    if hasattr(self, "engram"):
      x = self.engram(x, inputs.compressed_BxS, inputs.pad_id, batch)
    x, pre, (published, indexer_loss, trace) = self.hc_attn(
      x, carry.pre_BxSxM, lambda u: self.attn(self.attn_norm(u), batch, published)
    )
    x, pre, (load, balance, chosen) = self.hc_ffn(
      x, pre, lambda u: self.ffn(self.ffn_norm(u), batch)
    )
    aux = LayerAux(load, balance, indexer_loss, trace | chosen if capture else None)
    return Carry(x, pre), published, aux
