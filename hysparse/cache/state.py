"""The attention state of B sequences as arrays: float32, one row per sequence, not paged.

`layout.py` describes every component; `allocate` makes arrays of those descriptions and `forward`
returns a new `Cache` for each call. Sequences may have different lengths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache import layout as layout_lib
from hysparse.cache.groups import PartialGroup
from hysparse.cache.ring import EMPTY, Ring
from hysparse.config import ModelConfig


class CacheError(RuntimeError):
  """A sequence that outgrew its cache, or a cache whose rows are not those it should hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """What the layers of one run own, stacked on axis 0; None where a layer has no such state.

  Attributes:
    ring: sliding window.
    entries_BxTxC: main KV of a source; entry j covers tokens j*r .. j*r + r - 1.
    index_keys_BxTxD: indexer keys of the same entries.
    partial: the unfinished group of a source with r > 1.
    keys_BxTxHxC: of a plain layer, one per token.
    values_BxTxHxC: the same.
  """

  ring: Ring | None = None
  entries_BxTxC: Float[Array, "B T C"] | None = None
  index_keys_BxTxD: Float[Array, "B T D"] | None = None
  partial: PartialGroup | None = None
  keys_BxTxHxC: Float[Array, "B T H C"] | None = None
  values_BxTxHxC: Float[Array, "B T H C"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """State of B sequences.

  Attributes:
    layers: one `LayerCache` per run of the schedule.
    drafts: rings of the draft layers, stacked; None without drafts.
    history_BxL: the last N-1 compressed token ids, oldest first, -1 for none or an image.
    length_B: tokens of each sequence so far.
    error_B: a ring row was not the one expected, the sequence outgrew its arrays, or a call did not
      fit it (padding in front of tokens, image tokens without features).
    max_tokens: what the arrays have room for (static).
  """

  layers: tuple[LayerCache, ...]
  drafts: LayerCache | None
  history_BxL: Int[Array, "B L"] | None
  length_B: Int[Array, "B"]
  error_B: Bool[Array, "B"]
  max_tokens: int = dataclasses.field(metadata={"static": True})

  def check(self) -> None:
    """Waits for the arrays and raises for the sequences whose state is wrong.

    Raises:
      CacheError: naming the rows of the batch.
    """
    bad = np.flatnonzero(np.asarray(self.error_B))
    if len(bad):
      length = np.asarray(self.length_B)[bad]
      raise CacheError(
        f"cache: sequences {bad.tolist()} of lengths {length.tolist()} outgrew max_tokens"
        f" ({self.max_tokens}), got padding in front of tokens or image tokens without features, or"
        " hold rows that are not theirs"
      )


def allocate(config: ModelConfig, batch: int, max_tokens: int) -> Cache:
  """An empty cache for `batch` sequences of up to `max_tokens` tokens.

  Raises:
    CacheError: no sequences, or more tokens than the model has positions for.
  """
  if batch < 1:
    raise CacheError(f"batch: is {batch}; must be at least 1")
  if not 1 <= max_tokens <= config.max_positions:
    raise CacheError(
      f"max_tokens: is {max_tokens}; must be in 1..max_positions ({config.max_positions})"
    )
  plain = dict.fromkeys(("main_kv", "index_k", "window_kv"), "f32")
  described = layout_lib.layout(dataclasses.replace(config, **plain))
  kept = [*described.of("global"), *described.of("bounded")]

  def stacked(first: int, count: int) -> LayerCache:
    """Layers of a run are alike: what the first owns, all own."""
    owned = {}
    for component in kept:
      if first in component.layers:
        structs = component.structs(count, batch, component.rows_at(max_tokens))
        owned[component.name] = {n: jnp.zeros(s.shape, jnp.float32) for n, s in structs.items()}
    return _layer_cache(owned)

  lookback = config.engram_max_ngram - 1
  return Cache(
    layers=tuple(stacked(*run) for run in config.layers.runs()),
    drafts=stacked(len(config.layers), config.draft_layers) if config.draft_layers else None,
    history_BxL=jnp.full((batch, lookback), -1, jnp.int32) if config.engram_layers else None,
    length_B=jnp.zeros((batch,), jnp.int32),
    error_B=jnp.zeros((batch,), bool),
    max_tokens=max_tokens,
  )


def _layer_cache(owned: dict[str, dict[str, jax.Array]]) -> LayerCache:
  fields = {}
  for name, arrays in owned.items():
    if name.startswith("window"):
      rows = arrays["values"]
      fields["ring"] = Ring(rows, jnp.full(rows.shape[:3], EMPTY, jnp.int32))
    elif name == "main_kv":
      fields["entries_BxTxC"] = arrays["values"]
    elif name == "index_keys":
      fields["index_keys_BxTxD"] = arrays["values"]
    elif name == "partial_group":
      fields["partial"] = PartialGroup(arrays["kv"], arrays["score"])
    elif name == "plain_kv":
      fields["keys_BxTxHxC"], fields["values_BxTxHxC"] = arrays["keys"], arrays["values"]
  return LayerCache(**fields)


def append(
  into_BxTx: Float[Array, "B T ..."],
  rows_BxNx: Float[Array, "B N ..."],
  at_BxN: Int[Array, "B N"],
  valid_BxN: Bool[Array, "B N"],
) -> Float[Array, "B T ..."]:
  """Writes the valid rows at their places; what is beyond the end is dropped (see `error_B`)."""
  B, T = into_BxTx.shape[:2]
  at_BxN = jnp.where(valid_BxN, at_BxN, T)
  return into_BxTx.at[jnp.arange(B)[:, None], at_BxN].set(
    rows_BxNx.astype(into_BxTx.dtype), mode="drop"
  )


def push(
  history_BxL: Int[Array, "B L"], ids_BxS: Int[Array, "B S"], count_B: Int[Array, "B"]
) -> Int[Array, "B L"]:
  """The last L ids after the `count` first ones of a call."""
  joined = jnp.concatenate([history_BxL, ids_BxS], axis=1)
  at_BxL = count_B[:, None] + jnp.arange(history_BxL.shape[1])
  return jnp.take_along_axis(joined, at_BxL, axis=1)
