"""Some of a cache's sequences as a cache of their own, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Int

from hysparse.cache.state import Cache


def take(cache: Cache, slots_N: Int[Array, "N"]) -> Cache:
  """The sequences of some slots; the pools are the whole cache's."""
  return _bounded(cache, cache, lambda x, axis: x.take(slots_N, axis=axis))


def put(cache: Cache, slots_N: Int[Array, "N"], part: Cache) -> Cache:
  """The cache with what a call made of `take(cache, slots)`."""

  def set_rows(into: jax.Array, axis: int, rows: jax.Array) -> jax.Array:
    return into.at[(slice(None),) * axis + (slots_N,)].set(rows)

  return _bounded(cache, part, set_rows, part)


def _bounded(cache: Cache, pools: Cache, change: Callable, *others: Cache) -> Cache:
  """`change(array, batch axis, *those of others)` of all that is not in pools."""

  def along(axis: int, *values):
    return jax.tree.map(lambda x, *rest: change(x, axis, *rest), *values)

  layers = tuple(
    dataclasses.replace(
      layer,
      window=along(1, layer.window, *(other.layers[r].window for other in others)),
      partial=along(0, layer.partial, *(other.layers[r].partial for other in others)),
      pools=pools.layers[r].pools,
    )
    for r, layer in enumerate(cache.layers)
  )
  names = ("history_BxL", "length_B", "error_B")
  own = {n: along(0, getattr(cache, n), *(getattr(o, n) for o in others)) for n in names}
  table = along(0, cache.pages.table_BxJ, *(other.pages.table_BxJ for other in others))
  return dataclasses.replace(
    cache,
    layers=layers,
    drafts=along(1, cache.drafts, *(other.drafts for other in others)),
    pages=dataclasses.replace(cache.pages, table_BxJ=table),
    **own,
  )
