"""What layers hand on: published keys and selections, and small results beside the stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import Pool
from hysparse_kernels.paged import Paged
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache.groups import PartialGroup
from hysparse.cache.state import Pools


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Published:
  """The latest source's entries and keys, and the latest selection; each layer gets and returns it.

  No module keeps it, so reading another layer's stale keys cannot be written.

  Attributes:
    entries: main KV after RoPE, [T, C] of each sequence; None before any source and while no group
      is complete.
    index_keys: indexer keys of the same entries, without gradient to the backbone.
    ids_BxSxK: the latest selection of entries, -1 for none.
    rows_BxSxK: where these are among the rows of `entries`.
    pool: candidate blocks that later selections stay inside.
  """

  entries: Paged | None = None
  index_keys: Paged | None = None
  ids_BxSxK: Int[Array, "B S K"] | None = None
  rows_BxSxK: Int[Array, "B S K"] | None = None
  pool: Pool | None = None

  def selecting(self, ids_BxSxK: Int[Array, "B S K"], pool: Pool | None) -> Published:
    """The same with another selection and pool."""
    rows_BxSxK = self.entries.locate(ids_BxSxK)
    return dataclasses.replace(self, ids_BxSxK=ids_BxSxK, rows_BxSxK=rows_BxSxK, pool=pool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
  """What a layer leaves for its cache.

  Attributes:
    window: keys [B, S, C] of the call's tokens, yet to be written; None for plain layers.
    group: contributions of the call's tokens to a source with r > 1, yet to be written.
    pools: with the call's entries in them.
  """

  window: Stored | None = None
  group: PartialGroup | None = None
  pools: Pools | None = None


@dataclasses.dataclass(frozen=True)
class Told:
  """What an attention module tells beside its output.

  Attributes:
    published: what later layers read.
    kept: for the cache; None without one.
    stale_B: a ring row was not the one expected; None without a cache.
    indexer_loss: see `LayerAux`.
    trace: see `LayerAux`.
  """

  published: Published
  kept: Kept | None
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
