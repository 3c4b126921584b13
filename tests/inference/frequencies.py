"""Whether counted draws may come from given probabilities."""

from __future__ import annotations

import numpy as np
from scipy import stats

# Chance that right draws are called wrong. Seeds are fixed, so a test that passed keeps passing.
# With 60,000 draws and 25 cells a chi-square of 78 is this rare, and a sampler whose probabilities
# are off by 6 % of themselves gives over 200: small faults are seen.
FALSE_ALARM = 1e-6
LEAST_EXPECTED = 5  # per cell, below which the statistic does not follow its distribution
DRAWS = 60_000


def fit(cells_N: np.ndarray, probabilities_K: np.ndarray) -> bool:
  """A chi-square test of which of K cells each draw fell in; a cell of probability 0 must be empty.

  Cells that expect few draws count as one.
  """
  expected_K = len(cells_N) * np.asarray(probabilities_K, np.float64).ravel()
  counts_K = np.bincount(cells_N, minlength=len(expected_K))
  if len(counts_K) > len(expected_K) or counts_K[expected_K == 0].any():
    return False
  rare_K = expected_K < LEAST_EXPECTED
  pool = lambda x_K: np.append(x_K[~rare_K], x_K[rare_K].sum())  # noqa: E731
  counts, expected = pool(counts_K), pool(expected_K)
  counts, expected = counts[expected > 0], expected[expected > 0]
  statistic = ((counts - expected) ** 2 / expected).sum()
  return bool(statistic <= stats.chi2.isf(FALSE_ALARM, max(len(expected) - 1, 1)))
