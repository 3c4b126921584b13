"""Timing that survives a shared machine: interleaved runs, medians, a rate measured beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_MATRIX = 2048
_SHORT = 0.4  # seconds of a round for each call


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
  """Median seconds of each call; every round runs all of them, after one warm-up round.

  A short call is run again until it has had its part of the round, and its first run does not
  count: it finds the caches as the call before left them, which may have been a long one for an
  operation and a short one for its yardstick.

  Each call must return arrays; they are waited for.
  """
  taken: dict[str, list[float]] = {name: [] for name in calls}
  for round_number in range(rounds + 1):
    for name, call in calls.items():
      times = [seconds(call)]
      while sum(times) < _SHORT:
        times.append(seconds(call))
      if round_number:
        taken[name].append(statistics.median(times[1:] or times))
  return {name: statistics.median(times) for name, times in taken.items()}


def matmul() -> tuple[Callable[[], jax.Array], float]:
  """A float32 product of two square matrices, and its FLOPs: the machine's rate in the same run."""
  x = jax.random.normal(jax.random.key(0), (_MATRIX, _MATRIX), jnp.float32)
  product = jax.jit(lambda x: x @ x)
  return lambda: product(x), 2.0 * _MATRIX**3


def alternate(rounds: int, *measurements: Callable[[], float]) -> tuple[float, ...]:
  """Median seconds of measurements in turn; the first round of each only warms up."""
  taken = [[measure() for measure in measurements] for _ in range(rounds + 1)][1:]
  return tuple(statistics.median(times) for times in zip(*taken, strict=True))


def seconds(call: Callable[[], object]) -> float:
  """Of one call, with the arrays that it returns."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start
