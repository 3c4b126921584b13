"""What the arrays of a cache hold, by component: the layout's numbers, measured."""

from __future__ import annotations

import jax
import numpy as np

from hysparse.cache.allocate import leaves
from hysparse.cache.settle import Pending
from hysparse.cache.state import Cache
from hysparse.config import ModelConfig


def held_bytes(cache: Cache, config: ModelConfig, pending: Pending | None = None) -> dict[str, int]:
  """Bytes of the arrays behind each component of the layout, of all sequences together.

  Of the pools only live blocks count: those that hold tokens, shared ones once.

  Args:
    pending: of a call that was deferred, for the scratch; without it scratch is left out.
  """
  lengths = np.asarray(cache.length_B)
  table = np.asarray(cache.pages.table_BxJ)
  begun = np.arange(table.shape[1]) * cache.pages.tokens < lengths[:, None]
  live = len(np.unique(table[begun & (table >= 0)])) / cache.pages.blocks
  held: dict[str, int] = {}

  def count(leaf, array: jax.Array) -> None:
    component = leaf.component
    size = round(array.nbytes * live) if component.lifetime == "global" else array.nbytes
    held[component.name] = held.get(component.name, 0) + size

  jax.tree.map(count, leaves(cache, config), cache)
  if pending is not None:
    scratch = {
      "call_keys": (pending.windows, pending.drafts),
      "call_groups": pending.groups,
      "call_tokens": pending.ids_BxN,
    }
    sizes = {n: sum(x.nbytes for x in jax.tree.leaves(of)) for n, of in scratch.items()}
    held |= {name: size for name, size in sizes.items() if size}
  return held
