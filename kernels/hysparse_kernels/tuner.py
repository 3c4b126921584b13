"""Measures block sizes on the device at hand and writes the best ones into the tuning tables."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hysparse_kernels import compat, dispatch, tuning
from hysparse_kernels.catalogue import OPERATIONS, separated


@dataclasses.dataclass(frozen=True)
class Winner:
  """The fastest candidate for the calls that meet one row of a table.

  Attributes:
    row: the row as it is in the table.
    seconds: by candidate the median, summed over the specs that meet the row, or why it cannot run.
  """

  op: str
  backend: str
  row: Mapping[str, Any]
  specs: tuple[str, ...]
  seconds: tuple[tuple[Mapping[str, int], float | str], ...]

  @property
  def sizes(self) -> Mapping[str, int] | None:
    """Of the fastest candidate; None if none can run."""
    ran = [pair for pair in self.seconds if not isinstance(pair[1], str)]
    return min(ran, key=lambda pair: pair[1])[0] if ran else None

  def __str__(self) -> str:
    lines = [f"{self.op} {self.backend} upto {self.row.get('upto', {})}: {', '.join(self.specs)}"]
    for sizes, seconds in self.seconds:
      if isinstance(seconds, str):
        lines.append(f"     cannot run   {json.dumps(sizes)}: {seconds}")
      else:
        best = "*" if sizes == self.sizes else " "
        lines.append(f"  {1e3 * seconds:10.3f} ms {best} {json.dumps(sizes)}")
    return "\n".join(lines)

  def write(self) -> None:
    """Puts a row for this kind of device in front of the one that the calls met.

    A table that cannot be written to its end stays as it was.
    """
    table = tuning.table(self.op)
    rows, kind = table[self.backend]["rows"], compat.device_kind().lower()
    row = {**self.row, "device": kind, "sizes": dict(self.sizes)}
    at = rows.index(self.row)
    rows[at : at + (self.row["device"] == kind)] = [row]
    path = tuning.path(self.op)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(_text(table), encoding="utf-8")
    temporary.replace(path)


def _text(table: Mapping[str, Mapping[str, Any]]) -> str:
  """JSON with a line for each row."""
  backends = []
  for backend, entry in table.items():
    lists = [
      f'  "{kind}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
      for kind, rows in entry.items()
    ]
    backends.append(f' "{backend}": {{\n' + ",\n".join(lists) + "\n }")
  return "{\n" + ",\n".join(backends) + "\n}\n"


def backends_here(op: str) -> list[str]:
  """Backends with a table that run here."""
  here = dispatch.here(OPERATIONS[op].backends)
  return [name for name in tuning.table(op) if name in here] if tuning.has_table(op) else []


def tune(op: str, backend: str, rounds: int = 5) -> Iterator[Winner]:
  """Times all candidates on the released specs, row by row of the table.

  Raises:
    LookupError: no table for this operation or backend.
    BackendError: a backend that cannot run here.
  """
  if not tuning.has_table(op) or backend not in tuning.table(op):
    raise LookupError(f"{op}: has no tuning table for backend '{backend}'")
  operation = OPERATIONS[op]
  dispatch.select(op, backend, operation.backends)
  rows = list(tuning.table(op)[backend]["rows"])  # the table's own change as winners are written
  met: dict[int, list] = {}
  for spec in (spec for spec in operation.released if spec.name in operation.timed):
    arrays, rest = separated(spec.shapes())
    with tuning.recorded() as asked:
      jax.eval_shape(lambda a, rest=rest: operation.call(a | rest, backend), arrays)
    for row in [row for name, row in asked if name == (op, backend)][:1]:
      met.setdefault(rows.index(row), []).append(spec)
  for index, specs in sorted(met.items()):
    row = rows[index]
    candidates = [row["sizes"], *tuning.table(op)[backend]["candidates"]]
    candidates = [c for i, c in enumerate(candidates) if c not in candidates[:i]]
    by_spec = [_seconds(op, backend, spec, candidates, rounds) for spec in specs]
    totals = []
    for measured in zip(*by_spec, strict=True):
      reasons = [x for x in measured if isinstance(x, str)]
      totals.append(reasons[0] if reasons else sum(measured))
    names = tuple(spec.name for spec in specs)
    yield Winner(op, backend, row, names, tuple(zip(candidates, totals, strict=True)))


def _seconds(op: str, backend: str, spec, candidates: list, rounds: int) -> list[float | str]:
  """Median seconds of each candidate in alternating rounds, or why it cannot run."""
  arrays, rest = separated(spec.arguments())
  operation, calls, reasons = OPERATIONS[op], [], {}
  for sizes in candidates:
    call = jax.jit(lambda a: operation.call(a | rest, backend))
    try:
      with tuning.using(op, backend, sizes):
        jax.block_until_ready(call(arrays))
      calls.append(call)
    except Exception as error:  # a compiler's or a driver's, of any kind
      reasons[len(calls)] = f"{type(error).__name__}: {error}".splitlines()[0]
      calls.append(None)
  seconds: list[list[float]] = [[] for _ in calls]
  for _ in range(rounds):
    for call, times in zip(calls, seconds, strict=True):
      if call is not None:
        start = time.perf_counter()
        jax.block_until_ready(call(arrays))
        times.append(time.perf_counter() - start)
  return [reasons[i] if i in reasons else statistics.median(t) for i, t in enumerate(seconds)]
