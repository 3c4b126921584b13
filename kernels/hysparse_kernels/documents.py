"""Random packed documents, for the argument specs that tests, benchmarks and tuning share."""

from __future__ import annotations

import numpy as np


def packed_positions(
  rng: np.random.Generator, batch: int, length: int, align: int, documents: int
) -> np.ndarray:
  """[B, S] int32 positions: up to `documents` documents a row, starting at multiples of `align`."""
  rows = []
  for _ in range(batch):
    slots = np.arange(1, max(2, length // align))
    count = min(documents - 1, len(slots)) if length > align else 0
    starts = np.sort(np.append(rng.choice(slots, count, replace=False) * align, 0))
    lengths = np.diff(np.append(starts, length))
    rows.append(np.concatenate([np.arange(n) for n in lengths]))
  return np.stack(rows).astype(np.int32)


def visible_span(
  positions: np.ndarray, ratio: int, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Entries lo <= t < hi that each query of a packed row sees: its document's complete groups."""
  at = np.arange(positions.shape[1])
  lo = (at - positions) // ratio
  return lo.astype(np.int32), (lo + (positions + 1) // ratio).astype(np.int32)
