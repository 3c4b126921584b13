"""JSON that others wrote: what cannot be read is a ValueError, whatever is wrong with it."""

from __future__ import annotations

import collections
import json
from typing import Any


def parse(text: str | bytes, *, repeats: bool = False) -> Any:
  """The value of a JSON text.

  Args:
    text: of a file or a line; bytes are UTF-8.
    repeats: let a key stand twice in an object, where the last one counts.

  Raises:
    ValueError: broken JSON, broken UTF-8, a key that stands twice, or groups nested without end.
  """
  try:
    return json.loads(text, object_pairs_hook=None if repeats else _unique)
  except RecursionError:
    raise ValueError("is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    (key, _), *_ = collections.Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"{key} stands twice")
  return values
