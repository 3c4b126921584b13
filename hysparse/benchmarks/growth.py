"""How a decode step grows with the context, against its indexers alone at the same shapes.

    python scripts/bench.py growth

A step reads all index keys of its sequence and, of the entries, only those that it selects: it
cannot grow faster than the scoring does, unless something else walks over the context.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import select
from hysparse_kernels.paged import Paged

from hysparse.benchmarks.cached import Bench
from hysparse.benchmarks.timing import interleaved

CONFIG = "configs/bench/inference.py"
CONTEXTS = (4_096, 65_536)
STEPS = 16


@dataclasses.dataclass(frozen=True)
class Result:
  """Median seconds of a decode step and of one call of `indexer`, by context."""

  step_s: dict[int, float]
  indexer_s: dict[int, float]

  @property
  def step_growth(self) -> float:
    return self.step_s[CONTEXTS[1]] / self.step_s[CONTEXTS[0]]

  @property
  def indexer_growth(self) -> float:
    return self.indexer_s[CONTEXTS[1]] / self.indexer_s[CONTEXTS[0]]

  def __str__(self) -> str:
    lines = [f"{'context':>10} {'decode step':>12} {'indexer':>10}"]
    for n in CONTEXTS:
      lines.append(f"{n:10,} {1e3 * self.step_s[n]:9.2f} ms {1e3 * self.indexer_s[n]:7.2f} ms")
    lines.append(f"{'growth':>10} {self.step_growth:11.2f}x {self.indexer_growth:9.2f}x")
    lines.append(f"ratio of the two {self.step_growth / self.indexer_growth:.2f}")
    return "\n".join(lines)

  def to_dict(self) -> dict[str, Any]:
    both = {"step_growth": self.step_growth, "indexer_growth": self.indexer_growth}
    return dataclasses.asdict(self) | both


def run(rounds: int = 7) -> Result:
  """Everything in alternating rounds; medians."""
  bench = Bench.of(CONFIG)
  calls = {}
  for context in CONTEXTS:
    cache = bench.filled(1, context, context + (rounds + 2) * STEPS)
    calls["step", context] = bench.decoder(1, cache, STEPS)
    calls["indexer", context] = _indexer(bench, context)
  seconds = interleaved(calls, rounds)
  return Result(
    {n: seconds["step", n] / STEPS for n in CONTEXTS}, {n: seconds["indexer", n] for n in CONTEXTS}
  )


def _indexer(bench: Bench, context: int):
  """One selection by one token among all entries of a source of the schedule."""
  c = bench.config.model
  rng = np.random.default_rng(0)
  entries = context // c.layers[c.layers.kv_sources[0]].ratio
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
  q, weights = normal(1, 1, c.index_heads, c.index_dim), normal(1, 1, c.index_heads)
  keys = Paged.contiguous(Stored.of(normal(1, entries, c.index_dim), "f32"))
  lo, hi = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), entries, jnp.int32)
  call = jax.jit(lambda q, keys, weights: select(q, keys, weights, lo, hi, top_k=c.top_k))
  return lambda: call(q, keys, weights)
