"""What a cache says about a sequence, apart from how and where it keeps it."""

from __future__ import annotations

import jax
import numpy as np

from hysparse.cache.state import Cache
from hysparse.config import Config


def meaning(cfg: Config, cache: Cache, slot: int) -> dict[str, np.ndarray]:
  """What a cache says about one sequence, and nothing that nobody may look at.

  Rings in the order of their positions, unfinished groups and entries as far as there are tokens.
  """
  cache = jax.device_get(cache)
  length = int(cache.length_B[slot])
  said = {"length": length, "error": bool(cache.error_B[slot])}
  if cache.history_BxL is not None:
    said["history"] = cache.history_BxL[slot]
  rings = {f"run {r}": layer.window for r, layer in enumerate(cache.layers)}
  for name, ring in (rings | {"drafts": cache.drafts}).items():
    if ring is None:
      continue
    tags_NxW = ring.tags_BxW[:, slot]
    order_NxW = np.argsort(tags_NxW, axis=1)
    said[f"{name} positions"] = np.take_along_axis(tags_NxW, order_NxW, axis=1)
    there_NxW = said[f"{name} positions"] >= 0
    for part, rows in ring.rows.parts.items():
      ordered = np.take_along_axis(rows[:, slot], order_NxW[..., None], axis=1)
      said[f"{name} {part}"] = ordered[there_NxW]
  for r, (first, _) in enumerate(cfg.model.layers.runs()):
    layer, ratio = cache.layers[r], cfg.model.layers[first].ratio or 1
    if layer.partial is not None:
      for name, rows in vars(layer.partial).items():
        said[f"run {r} {name}"] = rows[slot, : length % ratio]
    entries, block = np.arange(length // ratio), cache.pages.tokens // ratio
    at = cache.pages.table_BxJ[slot, entries // block] * block + entries % block
    for n, pools in enumerate(layer.pools):
      for name, pool in vars(pools).items():
        parts = {} if pool is None else pool.parts
        for part, rows in parts.items():
          said[f"run {r} layer {n} {name} {part}"] = rows[at]
  return said


def assert_same_meaning(
  got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 0
) -> None:
  """Equal to the bit, or floats up to `tolerance` times their largest value."""
  assert got.keys() == want.keys()
  for name, value in want.items():
    if tolerance and np.asarray(value).dtype == np.float32:
      largest = max(1, np.abs(value).max(initial=0))
      np.testing.assert_allclose(got[name], value, atol=tolerance * largest, err_msg=name)
    else:
      np.testing.assert_array_equal(got[name], value, err_msg=name)
