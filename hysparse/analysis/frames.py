"""Rows as a DataFrame, where pandas is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

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
