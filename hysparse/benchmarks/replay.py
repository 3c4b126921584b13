"""Prefill by bounded replay against running every layer, encoder and decoder equally deep.

python scripts/bench.py replay
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax

from hysparse.benchmarks.cached import Bench

CONFIG = "configs/bench/replay.py"
TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Result:
  """Median seconds of a prefill of TOKENS tokens."""

  replay_s: float
  all_layers_s: float

  @property
  def ratio(self) -> float:
    return self.replay_s / self.all_layers_s

  def __str__(self) -> str:
    return (
      f"prefill of {TOKENS} tokens: replay {self.replay_s:.3f} s, all layers"
      f" {self.all_layers_s:.3f} s, ratio {self.ratio:.2f}"
    )

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {"ratio": self.ratio, "tokens": TOKENS}


def run(rounds: int = 7) -> Result:
  """Alternates the two; medians after one round that warms up."""
  bench = Bench.of(CONFIG)
  tokens_BxS = bench.tokens(1, TOKENS)
  seconds: dict[str, list[float]] = {"replay": [], "all_layers": []}
  for _ in range(rounds + 1):
    for prefill, values in seconds.items():
      cache = bench.empty(1, TOKENS)
      start = time.perf_counter()
      jax.block_until_ready(bench.prefill(cache, tokens_BxS, prefill))
      values.append(time.perf_counter() - start)
  return Result(*(statistics.median(values[1:]) for values in seconds.values()))
