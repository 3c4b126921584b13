"""The attention state of B sequences as arrays: packed rows, paged over tokens.

`layout.py` describes every component, `allocate.py` makes these arrays of the descriptions, and
`forward` returns a new `Cache` for each call. Sequences may have different lengths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hysparse_kernels.formats import Stored
from hysparse_kernels.paged import Paged
from jaxtyping import Array, Bool, Int

from hysparse.cache.groups import PartialGroup
from hysparse.cache.layout import Precision
from hysparse.cache.ring import Ring


class CacheError(RuntimeError):
  """A sequence that outgrew its cache, or a cache whose rows are not those it should hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
  """What one layer keeps of every token, of all sequences: rows [R, ...] in blocks.

  Attributes:
    main_kv: entries of a source; entry j covers tokens j*r .. j*r + r - 1.
    index_keys: indexer keys of the same entries.
    keys: of a plain layer, [R, heads, C], one row per token.
    values: the same.
  """

  main_kv: Stored | None = None
  index_keys: Stored | None = None
  keys: Stored | None = None
  values: Stored | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """What the layers of one run own.

  Attributes:
    window: rings of all layers of the run, stacked; None for plain layers.
    partial: the unfinished group of a source with r > 1 (a source is a run of its own).
    pools: one for each layer, or none at all.
  """

  window: Ring | None = None
  partial: PartialGroup | None = None
  pools: tuple[Pools, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Which blocks of the pools belong to whom: one table for all layers, over tokens.

  A block of P tokens holds P / r entries of each source, at the same place of every pool.

  Attributes:
    table_BxJ: block of each P tokens of a sequence, -1 for none.
    tokens: P (static).
    blocks: that the pools have (static).
  """

  table_BxJ: Int[Array, "B J"]
  tokens: int = dataclasses.field(metadata={"static": True})
  blocks: int = dataclasses.field(metadata={"static": True})

  def of(self, pool: Stored, ratio: int) -> Paged:
    """The entries of a source as its sequences see them."""
    return Paged(pool, self.table_BxJ, self.tokens // ratio)

  @property
  def room_B(self) -> Int[Array, "B"]:
    """Tokens that each sequence has blocks for."""
    return self.tokens * (self.table_BxJ >= 0).sum(1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """State of B sequences.

  Attributes:
    layers: one `LayerCache` per run of the schedule.
    drafts: rings of the draft layers, stacked; None without drafts.
    history_BxL: the last N-1 compressed token ids, oldest first, -1 for none or an image.
    length_B: tokens of each sequence so far.
    error_B: a ring row was not the one expected, the sequence outgrew its blocks, or a call did not
      fit it (padding in front of tokens, image tokens without features).
    pages: where its tokens are in the pools.
    precision: the formats of the rows (static).
  """

  layers: tuple[LayerCache, ...]
  drafts: Ring | None
  history_BxL: Int[Array, "B L"] | None
  length_B: Int[Array, "B"]
  error_B: Bool[Array, "B"]
  pages: Pages
  precision: Precision = dataclasses.field(metadata={"static": True})

  @property
  def max_tokens(self) -> int:
    """Tokens that the table of a sequence has places for."""
    return self.pages.table_BxJ.shape[1] * self.pages.tokens

  def within(self, tokens: int) -> Cache:
    """The same with a table cut to the blocks of `tokens` tokens: what is longer is an error.

    A call scores and masks all entries that the table has room for, so a short table makes it
    cheaper; lengths are compiled for, so take few different ones.
    """
    blocks = -(-tokens // self.pages.tokens)
    pages = dataclasses.replace(self.pages, table_BxJ=self.pages.table_BxJ[:, :blocks])
    return dataclasses.replace(self, pages=pages)

  def check(self) -> None:
    """Waits for the arrays and raises for the sequences whose state is wrong.

    Raises:
      CacheError: naming the rows of the batch.
    """
    bad = np.flatnonzero(np.asarray(self.error_B))
    if len(bad):
      length = np.asarray(self.length_B)[bad]
      raise CacheError(
        f"cache: sequences {bad.tolist()} of lengths {length.tolist()} outgrew their blocks"
        f" (max_tokens is {self.max_tokens}), got padding in front of tokens or image tokens"
        " without features, or hold rows that are not theirs"
      )
