"""Rows as a DataFrame, where pandas is there, and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hysparse.analysis import units
from hysparse.footprint import text

if TYPE_CHECKING:
  import pandas


def frame(rows: Iterable[Mapping[str, Any]], index: str | list[str]) -> pandas.DataFrame:
  """
  Raises:
    ModuleNotFoundError: without pandas, saying how to get it.
  """
  try:
    import pandas
  except ModuleNotFoundError:
    raise ModuleNotFoundError(
      "DataFrames need pandas, which `pip install -e '.[notebooks]'` brings"
    ) from None
  return pandas.DataFrame(list(rows)).set_index(index)


def lines(rows: Sequence[Mapping[str, Any]], right: Iterable[int]) -> str:
  """The same as text, a line each; the columns in `right` to the right."""
  head = [name.replace("_", " ") for name in rows[0]]
  return text.table([head, *([units.cell(x) for x in row.values()] for row in rows)], right)
