"""One layer: n-gram memory where scheduled, attention, experts, all around the residual streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from hysparse.cache.state import LayerCache
from hysparse.config import ModelConfig
from hysparse.nn.attention import Attention, Source
from hysparse.nn.batch import Batch
from hysparse.nn.engram import Engram, Ids
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Kept, LayerAux, Published
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
  ids: Ids | None  # if the model has Engram


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
  """What a layer changes: the streams and the fold that its first sublayer uses."""

  x_BxSxMxD: Float[Array, "B S M D"]
  pre_BxSxM: Float[Array, "B S M"]

  def __iter__(self) -> Iterator[Array]:
    return iter((self.x_BxSxMxD, self.pre_BxSxM))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Passed:
  """What a layer returns: the carry, what later layers read, what its cache gets, what it tells."""

  carry: Carry
  published: Published
  kept: Kept | None
  aux: LayerAux


@dataclasses.dataclass(frozen=True)
class Wanted:
  """What a layer is asked to tell.

  Attributes:
    trace: what the layer read and chose (for evaluation and comparison, not for training).
    entering: mean of the streams before attention, which draft layers read.
    kept_tokens: of how many of the call's last tokens to keep what its cache gets; None: all.
  """

  trace: bool = False
  entering: bool = False
  kept_tokens: int | None = None


class Block(nnx.Module):
  """Layer `layer` of the schedule; equal layers share one graph and differ in parameters only."""

  def __init__(
    self,
    config: ModelConfig,
    layer: int,
    run: Execution,
    *,
    rngs: nnx.Rngs,
    attention: type[nnx.Module] | None = None,
  ):
    """
    Args:
      attention: another class than the layer's mode has (the draft layers').
    """
    spec = config.layers[layer]
    if spec.engram:
      self.engram = Engram(config, layer, run, rngs=rngs)
    self.hc_attn = Streams(config, run, rngs=rngs)
    self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
    attention = attention or (PlainAttention if spec.mode in PLAIN else Attention)
    self.attn = attention(config, spec, run, rngs=rngs)
    self.hc_ffn = Streams(config, run, rngs=rngs)
    self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
    self.ffn = MoE(config, run, rngs=rngs)

  def __call__(
    self,
    carry: Carry,
    inputs: Inputs,
    published: Published,
    cache: LayerCache | None = None,
    wanted: Wanted = Wanted(),
    last: int | None = None,
  ) -> Passed:
    """The whole layer.

    Args:
      last: of a source: makes entries of all tokens, but only the last ones of each row pass
        through the layer.
    """
    x, rows = self.remember(carry.x_BxSxMxD, inputs)
    opened = None
    if wanted.trace and rows is not None:
      opened = self.engram.openings(carry.x_BxSxMxD, inputs.ids, inputs.batch)
    carry, source = Carry(x, carry.pre_BxSxM), None
    if last is not None:
      source = Source(self.attn_norm(self.hc_attn.read(*carry)), inputs.batch)
      carry = Carry(*inputs.batch.tail(tuple(carry), last))
      inputs, x = dataclasses.replace(inputs, batch=inputs.batch.last(last)), carry.x_BxSxMxD
    passed = self.transform(carry, inputs, published, cache, wanted, source)
    aux = passed.aux
    if opened is not None:
      told = {"engram": x, "engram_rows": rows, "engram_gates": opened}
      aux = dataclasses.replace(aux, trace=aux.trace | told)
    if wanted.entering:
      mean_BxSxD = x.astype(jnp.float32).mean(2).astype(x.dtype)
      aux = dataclasses.replace(aux, entering_BxSxD=mean_BxSxD)
    return dataclasses.replace(passed, aux=aux)

  def publish(
    self, carry: Carry, inputs: Inputs, cache: LayerCache, kept_tokens: int | None
  ) -> Kept:
    """Of a source: only makes its entries, for the cache."""
    x, _ = self.remember(carry.x_BxSxMxD, inputs)
    batch = inputs.batch
    source = Source(self.attn_norm(self.hc_attn.read(x, carry.pre_BxSxM)), batch)
    _, kept = self.attn.publish(source, cache)
    group = kept.group if kept_tokens is None else batch.tail(kept.group, kept_tokens)
    return Kept(group=group, pools=(kept.pools,))

  def remember(
    self, x_BxSxMxD: Float[Array, "B S M D"], inputs: Inputs
  ) -> tuple[Float[Array, "B S M D"], Int[Array, "B S J"] | None]:
    """The streams with n-gram memory and the rows looked up, if the layer has Engram."""
    if not hasattr(self, "engram"):
      return x_BxSxMxD, None
    return self.engram(x_BxSxMxD, inputs.ids, inputs.batch)

  def transform(
    self,
    carry: Carry,
    inputs: Inputs,
    published: Published,
    cache: LayerCache | None = None,
    wanted: Wanted = Wanted(),
    source: Source | None = None,
  ) -> Passed:
    """The layer behind Engram: attention, then experts."""
    batch = inputs.batch
    u, mix = self.hc_attn.enter(carry.x_BxSxMxD, carry.pre_BxSxM)
    y, told = self.attn(self.attn_norm(u), batch, published, cache, source)
    x, u, mix = self.hc_attn.leave_for(self.hc_ffn, carry.x_BxSxMxD, y, mix)
    y, load, balance, chosen = self.ffn(self.ffn_norm(u), batch)
    x, pre = self.hc_ffn.leave(x, y, mix), mix.pre_BxSxM
    trace = told.trace | chosen | {"streams": x, "pre": pre} if wanted.trace else None
    aux = LayerAux(load, balance, told.indexer_loss, told.stale_B, trace=trace)
    kept = told.kept
    if kept is not None and wanted.kept_tokens is not None:
      window = batch.tail(kept.window, wanted.kept_tokens)
      whole = batch if source is None else source.batch
      kept = Kept(window, whole.tail(kept.group, wanted.kept_tokens), kept.pools)
    return Passed(Carry(x, pre), told.published, kept, aux)
