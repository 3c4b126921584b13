"""Block sizes as data: one table per operation, `<op>/tuning.json`.

    {"pallas_tpu": {"rows": [{"device": "*", "upto": {"top_k": 512}, "sizes": {"queries": 8}}],
                    "candidates": [{"queries": 4}, {"queries": 8}]}}

The first row that fits holds: its device is the name that the device begins with (or "*"), and no
size of the call is larger than its bound. `scripts/tune.py` measures the candidates on the device
at hand and writes the rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping

from hysparse_kernels import compat

_Name = tuple[str, str]  # operation and backend
_forced: contextvars.ContextVar[Mapping[_Name, Mapping[str, int]] | None] = contextvars.ContextVar(
  "forced", default=None
)
_asked: contextvars.ContextVar[list | None] = contextvars.ContextVar("asked", default=None)


def path(op: str) -> pathlib.Path:
  return pathlib.Path(__file__).parent / op / "tuning.json"


def has_table(op: str) -> bool:
  return path(op).exists()


@functools.cache
def table(op: str) -> dict[str, dict]:
  """All of an operation's table, by backend."""
  return json.loads(path(op).read_text())


def sizes(op: str, backend: str, **shape: int) -> Mapping[str, int]:
  """The block sizes for a call.

  Args:
    shape: sizes of the call that the bounds of a row may name.

  Raises:
    LookupError: no row fits; a table ends in one without bounds.
  """
  if forced := (_forced.get() or {}).get((op, backend)):
    return forced
  row = _row(op, backend, shape)
  if (asked := _asked.get()) is not None:
    asked.append(((op, backend), row))
  return row["sizes"]


def _row(op: str, backend: str, shape: Mapping[str, int]) -> Mapping:
  kind = compat.device_kind().lower()
  for row in table(op)[backend]["rows"]:
    fits = all(shape[name] <= bound for name, bound in row.get("upto", {}).items())
    if fits and (row["device"] == "*" or kind.startswith(row["device"])):
      return row
  raise LookupError(f"{path(op).name} of {op}: no row of '{backend}' fits {shape} on {kind}")


@contextlib.contextmanager
def using(op: str, backend: str, sizes: Mapping[str, int]) -> Iterator[None]:
  """These sizes instead of the table's, for what is traced inside."""
  token = _forced.set({**(_forced.get() or {}), (op, backend): sizes})
  try:
    yield
  finally:
    _forced.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[_Name, Mapping]]]:
  """((operation, backend), row) of every look-up inside."""
  asked: list = []
  token = _asked.set(asked)
  try:
    yield asked
  finally:
    _asked.reset(token)
