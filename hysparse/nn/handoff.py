"""What layers hand on: published keys and selections, and small results beside the stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from hysparse_kernels.indexer import Pool
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache.state import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Published:
  """The latest source's entries and keys, and the latest selection; each layer gets and returns it.

  No module keeps it, so reading another layer's stale keys cannot be written.

  Attributes:
    entries_BxTxC: main KV after RoPE; None before any source and while no group is complete.
    index_keys_BxTxD: indexer keys of the same entries, without gradient to the backbone.
    rows_BxSxK: the latest selection, -1 for none.
    pool: candidate blocks that later selections stay inside.
  """

  entries_BxTxC: Float[Array, "B T C"] | None = None
  index_keys_BxTxD: Float[Array, "B T D"] | None = None
  rows_BxSxK: Int[Array, "B S K"] | None = None
  pool: Pool | None = None


@dataclasses.dataclass(frozen=True)
class Told:
  """What an attention module tells beside its output.

  Attributes:
    published: what later layers read.
    cache: the layer's cache after the call; None without one.
    stale_B: a ring row was not the one expected; None without a cache.
    indexer_loss: see `LayerAux`.
    trace: see `LayerAux`.
  """

  published: Published
  cache: LayerCache | None
  stale_B: Bool[Array, "B"] | None
  indexer_loss: Float[Array, ""]
  trace: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerAux:
  """What a layer tells beside its output.

  Attributes:
    load_E: valid tokens that each routed expert got, float32.
    balance_loss: sequence-wise balance loss of the router, scalar.
    indexer_loss: KL of the layer's indexer, scalar; 0 without an indexer.
    stale_B: a ring row was not the one expected; None without a cache.
    entering_BxSxD: mean of the streams before attention, if the drafts ask for it.
    trace: what was asked for with `capture`, else None: inputs and choices of the layer by name.
  """

  load_E: Float[Array, "*kinds E"]
  balance_loss: Float[Array, ""]
  indexer_loss: Float[Array, ""]
  stale_B: Bool[Array, "B"] | None = None
  entering_BxSxD: Float[Array, "B S D"] | None = None
  trace: dict[str, Any] | None = None
