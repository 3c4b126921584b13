"""What the arrays of a cache hold, by component: the layout's numbers, measured."""

from __future__ import annotations

import jax
import numpy as np

from hysparse.cache.layout import Component, layout
from hysparse.cache.settle import Pending
from hysparse.cache.state import Cache
from hysparse.config import ModelConfig


def held_bytes(cache: Cache, config: ModelConfig, pending: Pending | None = None) -> dict[str, int]:
  """Bytes of the arrays behind each component of the layout, of all sequences together.

  Of the pools only live blocks count: those that hold tokens, shared ones once.

  Args:
    pending: of a call that was deferred, for the scratch; without it scratch is left out.
  """
  described = layout(config, cache.precision, block_tokens=cache.pages.tokens)
  lengths = np.asarray(cache.length_B)
  table = np.asarray(cache.pages.table_BxJ)
  begun = np.arange(table.shape[1]) * cache.pages.tokens < lengths[:, None]
  live = len(np.unique(table[begun & (table >= 0)])) / cache.pages.blocks
  runs = {layer: r for r, (first, n) in enumerate(config.layers.runs())
          for layer in range(first, first + n)}  # fmt: skip
  held: dict[str, int] = {}
  for component in described:
    arrays = _arrays(component, cache, pending, runs)
    if arrays is None:
      continue
    size = sum(x.nbytes for x in jax.tree.leaves(arrays))
    if component.lifetime == "global":
      size = round(size * live)
    held[component.name] = held.get(component.name, 0) + size
  return held


def _arrays(component: Component, cache: Cache, pending: Pending | None, runs: dict[int, int]):
  """The arrays behind all copies of a component; None if they are not asked for."""
  name, lifetime = component.name, component.lifetime
  own = sorted({runs[layer] for layer in component.layers if layer in runs})
  layers = [cache.layers[r] for r in own]
  draft = any(layer not in runs for layer in component.layers)
  if lifetime == "global":
    fields = ("keys", "values") if name == "plain_kv" else (name,)
    return [getattr(pools, f) for layer in layers for pools in layer.pools for f in fields]
  if lifetime == "scratch":
    if pending is None:
      return None
    if name == "call_keys":
      return [pending.windows[r] for r in own], pending.drafts
    return [pending.groups[r] for r in own] if name == "call_groups" else pending.ids_BxN
  rings = [layer.window for layer in layers] + ([cache.drafts] if draft else [])
  if name.startswith("window"):
    return [ring.rows for ring in rings]
  if name == "ring_tags":
    return [ring.tags_BxW for ring in rings]
  return {
    "partial_group": lambda: [layer.partial for layer in layers],
    "engram_history": lambda: cache.history_BxL,
    "block_table": lambda: cache.pages.table_BxJ,
    "status": lambda: (cache.length_B, cache.error_B),
  }[name]()
