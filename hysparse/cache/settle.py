"""Writes bounded state when a call is over and it is known how many of its tokens stay.

Entries are appended while a call runs, because its own queries may see them; those of tokens that
do not stay lie beyond the sequence's length, where nobody looks, and are overwritten later. Rings,
unfinished groups and the n-gram history have no such place: they wait here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from hysparse_kernels.formats import Stored
from jaxtyping import Array, Bool, Int

from hysparse.cache import groups, ring
from hysparse.cache.groups import PartialGroup
from hysparse.cache.state import Cache, Pools


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
  """What the `count` valid tokens of a call would write.

  Of N tokens that something is kept of, all belong to the call's last ones: they start at its
  token max(count - N, 0).

  Attributes:
    windows: keys [n, B, N, C] of each run of n layers; None for plain layers. Runs that did not
      take part in the call are missing.
    groups: contributions of each run that is a source with r > 1, else None.
    drafts: keys [n, B, N, C] of the draft layers; None without drafts, or if they read a layer that
      did not take part.
    ids_BxN: compressed token ids; None without Engram.
    count_B: valid tokens of the call.
    error_B: see `Cache`.
  """

  windows: tuple[Stored | None, ...]
  groups: tuple[PartialGroup | None, ...]
  drafts: Stored | None
  ids_BxN: Int[Array, "B N"] | None
  count_B: Int[Array, "B"]
  error_B: Bool[Array, "B"]

  def first_B(self, kept: int) -> Int[Array, "B"]:
    """The call's token that N kept ones start at."""
    return jnp.maximum(self.count_B - kept, 0)


def appended(cache: Cache, pools: Sequence[tuple[Pools, ...] | None]) -> Cache:
  """The cache with the pools of its first runs as a call leaves them; None: as they were."""
  layers = list(cache.layers)
  for r, own in enumerate(pools):
    if own is not None:
      layers[r] = dataclasses.replace(layers[r], pools=own)
  return dataclasses.replace(cache, layers=tuple(layers))


def settle(cache: Cache, pending: Pending, accepted_B: Int[Array, "B"] | None = None) -> Cache:
  """The cache after a call of which the `accepted` first tokens stay; None: all valid ones.

  Fewer than all may stay only if the call kept all of its tokens (`forward(..., defer=True)`).
  """
  accepted_B = pending.count_B if accepted_B is None else accepted_B
  length_B = cache.length_B

  def written(before: ring.Ring, rows: Stored) -> ring.Ring:
    N = rows.shape[2]
    at_BxN = pending.first_B(N)[:, None] + jnp.arange(N)
    return ring.write(before, rows, length_B[:, None] + at_BxN, at_BxN < accepted_B[:, None])

  layers = []
  runs = itertools.zip_longest(cache.layers, pending.windows, pending.groups)
  for layer, window, call in runs:
    if window is not None:
      layer = dataclasses.replace(layer, window=written(layer.window, window))
    if call is not None:
      ratio = layer.partial.kv_BxRxC.shape[1] + 1
      first_B = pending.first_B(call.kv_BxRxC.shape[1])
      left = groups.remainder(layer.partial, call, length_B, first_B, accepted_B, ratio)
      layer = dataclasses.replace(layer, partial=left)
    layers.append(layer)
  history = cache.history_BxL
  if history is not None:
    joined = jnp.concatenate([history, pending.ids_BxN], axis=1)
    last_B = accepted_B - pending.first_B(pending.ids_BxN.shape[1])
    at_BxL = last_B[:, None] + jnp.arange(history.shape[1])
    history = jnp.take_along_axis(joined, jnp.maximum(at_BxL, 0), axis=1)
  after_B = length_B + accepted_B
  return dataclasses.replace(
    cache,
    layers=tuple(layers),
    drafts=cache.drafts if pending.drafts is None else written(cache.drafts, pending.drafts),
    history_BxL=history,
    length_B=after_B,
    error_B=cache.error_B | pending.error_B | (after_B > cache.pages.room_B),
  )
