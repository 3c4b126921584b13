"""The operations at the released sizes beside their yardsticks, in one run.

    python scripts/bench.py kernels [--rounds=5] [--json=FILE]

Every row says how the time of an operation compares with that of a yardstick, and the bound that
the project holds itself to. On a GPU or TPU the rows are those of `device_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hysparse_kernels import compat
from hysparse_kernels import moe as moe_op
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import Pool, select
from hysparse_kernels.paged import Paged
from hysparse_kernels.sparse_attention import View, sparse_attention

from hysparse.benchmarks import device_kernels, yardsticks
from hysparse.benchmarks.timing import interleaved, matmul

ENTRIES, QUERIES, TOP_K = 65_536, 128, 512
HEADS, CHANNELS, WINDOW = 64, 512, 128
INDEX_HEADS, INDEX_DIM, POOL, POOL_BLOCK = 32, 128, 16_384, 8
MOE = {"tokens": 4096, "active": 2, "experts": 16, "width": 256, "inner": 512}


@dataclasses.dataclass(frozen=True)
class Row:
  """An operation beside one yardstick: ratio = its seconds / those of the yardstick."""

  what: str
  yardstick: str
  seconds: float
  yardstick_s: float
  at_most: float

  @property
  def ratio(self) -> float:
    return self.seconds / self.yardstick_s

  def __str__(self) -> str:
    return (
      f"{self.what:34} {1e3 * self.seconds:9.2f} ms  {self.yardstick:52}"
      f" {1e3 * self.yardstick_s:9.2f} ms {self.ratio:7.3f}  (at most {self.at_most:.3f}"
      f"{', MISSED' if self.ratio > self.at_most else ''})"
    )


@dataclasses.dataclass(frozen=True)
class Result:
  """All rows, and the float32 matrix rate of the run."""

  rows: tuple[Row, ...]
  flops_per_s: float

  def __str__(self) -> str:
    rate = f"float32 matrix rate {self.flops_per_s / 1e9:.0f} GFLOP/s"
    return "\n".join([*map(str, self.rows), rate])

  def to_dict(self) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
    return {"rows": rows, "flops_per_s": self.flops_per_s}


@dataclasses.dataclass
class Bench:
  """Calls to time, and how to read their seconds as rows."""

  calls: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
  compared: list[tuple] = dataclasses.field(default_factory=list)

  def time(self, name: str, function: Callable, *arguments: Any) -> None:
    compiled = jax.jit(function)
    self.calls[name] = lambda: compiled(*arguments)

  def compare(
    self, name: str, yardstick: str, at_most: float, *parts: str, flops: float = 0.0
  ) -> None:
    """`name` against the sum of `parts` and the time of `flops` at the matrix rate."""
    self.compared.append((name, yardstick, at_most, parts or (yardstick,), flops))

  def run(self, rounds: int) -> Result:
    product, product_flops = matmul()
    seconds = interleaved({**self.calls, "matmul": product}, rounds)
    rate = product_flops / seconds["matmul"]
    rows = [
      Row(name, yardstick, seconds[name], sum(seconds[p] for p in parts) + flops / rate, at_most)
      for name, yardstick, at_most, parts, flops in self.compared
    ]
    return Result(tuple(rows), rate)


def run(rounds: int = 7) -> Result | device_kernels.Result:
  """Everything in alternating rounds; medians."""
  if compat.platform() != "cpu":
    return device_kernels.run(rounds)
  bench = Bench()
  for add in (_attention, _indexer, _moe):
    add(bench)
  return bench.run(rounds)


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _packed(rng: np.random.Generator, rows: int, channels: int, format: str) -> Stored:
  return jax.jit(lambda x: Stored.of(x, format))(_normal(rng, rows, channels))


def _attention(bench: Bench) -> None:
  """Prefill of a query block, and one decode step of eight sequences."""
  rng = np.random.default_rng(0)
  entries = _packed(rng, ENTRIES, CHANNELS, "fp4")
  sink = _normal(rng, HEADS)
  attend = functools.partial(sparse_attention, scale=CHANNELS**-0.5)
  flops = 4.0 * HEADS * (TOP_K + WINDOW) * CHANNELS  # of a query: scores and values
  for name, batch, queries in (("prefill", 1, QUERIES), ("decode", 8, 1)):
    q = _normal(rng, batch, queries, HEADS, CHANNELS)
    rows = _selected(rng, batch, queries)
    window = _packed(rng, batch * (WINDOW - 1 + queries), CHANNELS, "fp8")
    window = jax.tree.map(lambda x, batch=batch: x.reshape(batch, -1, x.shape[-1]), window)
    positions = ENTRIES + jnp.arange(window.shape[1])
    tags = jnp.broadcast_to(positions, (batch, window.shape[1]))
    view = View(window, tags, entries, rows, WINDOW)
    ours = f"sparse_attention {name}"
    bench.time(ours, attend, q, tags[:, -queries:], view, sink)
    bench.time(f"rows {name}", yardsticks.decoded, entries, rows)
    at_most = 0.85 if name == "prefill" else 1.6
    bench.compare(
      ours, "gather and dequantise written out + FLOPs at rate", at_most, f"rows {name}",
      flops=batch * queries * flops,
    )  # fmt: skip
    if name == "prefill":
      plain = window.decode()[:, -WINDOW:]
      for size in (2, 4):
        work = functools.partial(yardsticks.in_cache, queries=size)
        bench.time(f"in cache, {size}", work, q, entries, rows, plain)
      bench.compare(ours, "in-cache gather, dequantise, same matmuls", 1.5, "in cache, 2")
      bench.compare(ours, "the same, blocks of 4 queries", 1.5, "in cache, 4")
      bench.time("dense", yardsticks.dense, q[0], entries)
      bench.compare(ours, "dense attention over all entries", 0.25, "dense")


def _selected(rng: np.random.Generator, batch: int, queries: int) -> jax.Array:
  """Rows for each query, ascending, of the newest entries and of others."""
  rows = [np.sort(rng.choice(ENTRIES, TOP_K, replace=False)) for _ in range(batch * queries)]
  return jnp.asarray(np.stack(rows).reshape(batch, queries, TOP_K), jnp.int32)


def _indexer(bench: Bench) -> None:
  """All keys, and the pool of a query, from two lengths of context."""
  rng = np.random.default_rng(1)
  q = _normal(rng, 1, QUERIES, INDEX_HEADS, INDEX_DIM)
  weights = _normal(rng, 1, QUERIES, INDEX_HEADS)
  keys = {n: _packed(rng, n, INDEX_DIM, "mxfp4") for n in (ENTRIES, 4 * ENTRIES)}
  lo = jnp.zeros((1, QUERIES), jnp.int32)

  def chosen(q, keys, weights, within=None):
    paged = Paged(keys, None, keys.shape[0])
    hi = jnp.full((1, QUERIES), keys.shape[0], jnp.int32)
    return select(q, paged, weights, lo, hi, top_k=TOP_K, within=within).rows_BxSxK

  bench.time("indexer", chosen, q, keys[ENTRIES], weights)
  bench.time("products", yardsticks.score_products, q[0], keys[ENTRIES].decode())
  bench.time("top-k", lambda s: jax.lax.top_k(s, TOP_K), _normal(rng, QUERIES, ENTRIES))
  bench.compare("indexer", "blocked products + lax.top_k", 1.25, "products", "top-k")

  pools = {}
  for n in keys:
    blocks = [
      np.sort(rng.choice(n // POOL_BLOCK, POOL // POOL_BLOCK, replace=False))
      for _ in range(QUERIES)
    ]
    pools[n] = Pool(jnp.asarray(np.stack(blocks)[None], jnp.int32), POOL_BLOCK)
    bench.time(f"indexer, pool, {n} keys", chosen, q, keys[n], weights, pools[n])
  small, large = (f"indexer, pool, {n} keys" for n in keys)
  work = functools.partial(yardsticks.pooled_scores, top_k=TOP_K)
  bench.time("pool", work, q[0], keys[ENTRIES], pools[ENTRIES].entry_ids()[0])
  bench.compare(small, "gather, dequantise, products, top-k", 1.3, "pool")
  bench.compare(large, f"the same pool size of {ENTRIES:,} keys", 1.1, small)


def _moe(bench: Bench) -> None:
  """Even routing against `ragged_dot`, and the same number of rows for one expert."""
  rng = np.random.default_rng(2)
  N, A, E, D, F = MOE.values()
  x, dy = _normal(rng, N, D), _normal(rng, N, D)
  ids = jnp.asarray(np.argsort(rng.normal(size=(N, E)), axis=1)[:, :A], jnp.int32)
  weights = jnp.asarray(rng.uniform(0.1, 1.0, (N, A)), jnp.float32)
  matrices = [_normal(rng, E, D, F) / D**0.5, _normal(rng, E, D, F) / D**0.5]
  matrices.append(_normal(rng, E, F, D) / F**0.5)
  ours = functools.partial(moe_op.moe, limit=0.0)

  def trained(function):
    loss = lambda x, ids, weights, *w: (function(x, ids, weights, *w) * dy).sum()  # noqa: E731
    return jax.grad(loss, argnums=(0, 2, 3, 4, 5))

  bench.time("moe", ours, x, ids, weights, *matrices)
  bench.time("moe with gradient", trained(ours), x, ids, weights, *matrices)
  bench.time("ragged_dot", yardsticks.ragged_moe, x, ids, weights, *matrices)
  bench.time("ragged_dot grad", trained(yardsticks.ragged_moe), x, ids, weights, *matrices)
  bench.time("moe, all to one expert", ours, x, jnp.zeros_like(ids), weights, *matrices)
  bench.compare("moe", "ragged_dot", 1 / 12, "ragged_dot")
  bench.compare("moe with gradient", "ragged_dot with gradient", 1 / 8, "ragged_dot grad")
  bench.compare("moe, all to one expert", "even routing", 2.0, "moe")
