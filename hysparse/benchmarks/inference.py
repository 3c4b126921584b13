"""Prefill and decode beside a peer: the `deepseek_v4` model of transformers, of the same sizes.

    bash scripts/bench_peers/setup.sh
    python scripts/bench.py inference

Rounds alternate between the two; the peer's first round is left out like ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hysparse.benchmarks.cached import Bench
from hysparse.benchmarks.peer import Peer
from hysparse.benchmarks.timing import alternate, seconds

CONFIG = "configs/bench/inference.py"
CONTEXT, STEPS = 1024, 32
BATCHES, PROMPTS = (1, 8), (1024, 4096)


@dataclasses.dataclass(frozen=True)
class Row:
  """Median seconds of one measurement, ours and the peer's, for so many tokens."""

  what: str
  tokens: int
  ours_s: float
  peer_s: float

  @property
  def ratio(self) -> float:
    return self.peer_s / self.ours_s

  def __str__(self) -> str:
    ours, peer = (self.tokens / s for s in (self.ours_s, self.peer_s))
    return f"{self.what:32} {ours:9,.0f} {peer:9,.0f} tokens/s {self.ratio:7.2f}x"


@dataclasses.dataclass(frozen=True)
class Result:
  """The table of `scripts/bench.py inference`."""

  rows: tuple[Row, ...]
  facts: dict[str, Any]

  def __str__(self) -> str:
    head = f"{'':32} {'ours':>9} {'peer':>9}"
    return "\n".join([head, *map(str, self.rows), f"peer: {self.facts}"])

  def to_dict(self) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
    return {"rows": rows, "peer": self.facts}


def run(rounds: int = 7) -> Result:
  """Measures every row; `rounds` alternating measurements each, medians."""
  bench, separate = Bench.of(CONFIG), Bench.of(CONFIG, separate_experts=True)
  rows = []
  with Peer() as peer:
    for batch in BATCHES:
      decode, apart = (
        own.decoder(batch, own.filled(batch, CONTEXT, 2 * CONTEXT), STEPS)
        for own in (bench, separate)
      )
      fields = {"context": CONTEXT, "batch": batch, "steps": STEPS}
      ours, faster, theirs = alternate(
        rounds, lambda decode=decode: seconds(decode), lambda apart=apart: seconds(apart),
        lambda fields=fields: STEPS * peer.measure("decode", **fields)["seconds"],
      )  # fmt: skip
      rows.append(Row(f"decode at {CONTEXT}, batch {batch}", batch * STEPS, ours, theirs))
      rows.append(Row("  with separate experts", batch * STEPS, faster, theirs))
    for length in PROMPTS:
      tokens_BxS = bench.tokens(1, length)

      def prefill(tokens_BxS=tokens_BxS, length=length) -> float:
        cache = bench.empty(1, length)
        return seconds(lambda: bench.prefill(cache, tokens_BxS))

      ours, theirs = alternate(
        rounds, prefill, lambda length=length: peer.measure("prefill", tokens=length)["seconds"]
      )
      rows.append(Row(f"prefill of {length}", length, ours, theirs))
    return Result(tuple(rows), peer.facts)
