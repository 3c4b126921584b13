"""What a call of the model may ask for, and what it returns."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache import layout
from hysparse.cache.settle import Pending
from hysparse.cache.state import Cache
from hysparse.config import ModelConfig
from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import LayerAux


@dataclasses.dataclass(frozen=True)
class Call:
  """How a call runs; static.

  Attributes:
    prefill: "all_layers", or "replay": all tokens pass through the encoder and the projections of
      the decoder's source, but only the last W of each row through the decoder's layers. An
      approximation (the report's bounded replay, applied to the decoder at every prefill), for
      prompts only; tokens that came before are seen as far as they went through the decoder.
    more: the prompt goes on in the next call. Under "replay" the decoder's layers are then left
      out: the result has no logits and its `x` is that of no token. The last piece of a prompt must
      have W tokens at least (or be the whole prompt): the decoder sees nothing else of it.
    defer: return `Pending` beside a cache that only has the call's entries appended; `settle`
      writes as many tokens as stay (cache/settle.py).
    capture: unroll the layers and return their traces.
  """

  prefill: Literal["all_layers", "replay"] = "all_layers"
  more: bool = False
  defer: bool = False
  capture: bool = False

  @property
  def replays(self) -> bool:
    return self.prefill == "replay"

  def check(self, config: ModelConfig, run: Execution, batch: Batch, cache: Cache | None) -> None:
    """Refuses what cannot be computed.

    Raises:
      ValueError: a batch that does not fit the model or the cache, or a call that does not fit the
        schedule.
    """
    B, S = batch.tokens_BxS.shape
    if self.prefill not in ("all_layers", "replay"):
      raise ValueError(f"prefill: is {self.prefill!r}; must be 'all_layers' or 'replay'")
    if cache is None:
      if config.max_positions < S:
        raise ValueError(
          f"batch: rows of {S} tokens; model.max_positions is {config.max_positions}"
        )
      if self.defer or self.replays:
        raise ValueError("forward: defer and prefill='replay' need a cache")
      return
    if len(cache.length_B) != B:
      raise ValueError(f"batch: {B} rows for a cache of {len(cache.length_B)} sequences")
    needed = layout.Precision.of(config, run.numerics)
    if cache.precision != needed:
      raise ValueError(
        f"cache: holds {cache.precision}; numerics '{run.numerics}' needs {needed}: allocate it"
        " with the config of this model"
      )
    kept = layout.kept_tokens(config)
    if self.defer and kept < S:
      raise ValueError(f"forward: defer keeps calls of at most {kept} tokens, this one has {S}")
    reason = config.layers.replay_unsupported_reason() if self.replays else None
    if reason:
      raise ValueError(f"prefill: 'replay' cannot be used: {reason}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
  """What the layers return.

  Attributes:
    x_BxSxD: states behind the final norm.
    batch: the tokens they belong to; under "replay" the last ones of each row.
    cache: after the call; None without one.
    pending: see `Call.defer`.
    aux: the `LayerAux` of all layers stacked on axis 0; traces as a list.
    main_BxSxTD: what the draft layers read, if there are any and a cache or traces were asked for.
  """

  x_BxSxD: Float[Array, "B S D"]
  batch: Batch
  cache: Cache | None
  pending: Pending | None
  aux: LayerAux
  main_BxSxTD: Float[Array, "B S TD"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
  """Logits in float32 for the positions asked; the rest as in `Hidden`."""

  logits_BxNxV: Float[Array, "B N V"]
  cache: Cache | None
  pending: Pending | None
  aux: LayerAux
  main_hidden_BxSxTD: Float[Array, "B S TD"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
  """A drafted block.

  Attributes:
    ids_BxN: the anchor, then the drafts.
    logits_BxNxV: from which each draft was taken, float32.
    confidence_BxN: that the draft will be accepted, a raw logit.
    error_B: the cache held rows that are not the sequence's.
  """

  ids_BxN: Int[Array, "B N+1"]
  logits_BxNxV: Float[Array, "B N V"]
  confidence_BxN: Float[Array, "B N"]
  error_B: Bool[Array, "B"]
