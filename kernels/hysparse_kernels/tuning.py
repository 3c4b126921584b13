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
  """All of an operation's table, by backend.

  Raises:
    ValueError: a file that is no such table, saying where.
  """
  file = path(op)
  try:
    backends = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{file}: is no tuning table ({error})") from None
  if not isinstance(backends, dict):
    raise ValueError(f"{file}: is no tuning table; must be an object of backends")
  for backend, entry in backends.items():
    _check(f"{file}: {backend}", entry)
  return backends


def _check(where: str, entry: object) -> None:
  """Refuses what is not the rows and candidates of a backend."""
  if not isinstance(entry, dict) or set(entry) != {"rows", "candidates"}:
    raise ValueError(f"{where}: must have 'rows' and 'candidates'")
  rows, candidates = entry["rows"], entry["candidates"]
  if not isinstance(rows, list) or not rows or not isinstance(candidates, list):
    raise ValueError(f"{where}: 'rows' must be a list with a row, 'candidates' a list")
  names = None
  for i, row in enumerate(rows):
    fields = set(row) if isinstance(row, dict) else set()
    if not {"device", "sizes"} <= fields <= {"device", "sizes", "upto"}:
      raise ValueError(f"{where}: row {i} is {row}; must have device and sizes, and may have upto")
    if not isinstance(row["device"], str) or row["device"] != row["device"].lower():
      raise ValueError(f"{where}: row {i} is of device {row['device']!r}; must be in lower case")
    if not _are_sizes(row.get("upto", {}), row["sizes"]):
      raise ValueError(f"{where}: row {i} is {row}; sizes must be whole numbers from 1 up")
    names = names or set(row["sizes"])
    if set(row["sizes"]) != names:
      raise ValueError(f"{where}: row {i} is {row}; must have the sizes {sorted(names)}")
  for sizes in candidates:
    if not _are_sizes(sizes) or set(sizes) != names:
      raise ValueError(f"{where}: candidate {sizes}; must have the sizes {sorted(names)}")


def _are_sizes(*groups: object) -> bool:
  return all(
    isinstance(group, dict) and all(type(size) is int and size > 0 for size in group.values())
    for group in groups
  )


def sizes(op: str, backend: str, **shape: int) -> Mapping[str, int]:
  """The block sizes for a call.

  Args:
    shape: sizes of the call that the bounds of a row may name.

  Raises:
    LookupError: no row fits; a table ends in one without bounds.
    ValueError: a file that is no table.
  """
  forced = (_forced.get() or {}).get((op, backend))
  if forced is not None:
    return forced
  row = _row(op, backend, shape)
  if (asked := _asked.get()) is not None:
    asked.append(((op, backend), row))
  return row["sizes"]


def _row(op: str, backend: str, shape: Mapping[str, int]) -> Mapping:
  kind = compat.device_kind().lower()
  if not has_table(op) or backend not in table(op):
    raise LookupError(f"{path(op)}: there is no table for backend '{backend}'")
  for row in table(op)[backend]["rows"]:
    upto = row.get("upto", {})
    if unknown := upto.keys() - shape.keys():
      raise LookupError(
        f"{path(op)}: a row of '{backend}' has a bound of '{min(unknown)}'; calls have"
        f" {', '.join(sorted(shape)) or 'no sizes'}"
      )
    fits = all(shape[name] <= bound for name, bound in upto.items())
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
