"""Sums the description of the attention state (cache/layout.py)."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, get_args

from hysparse.cache import layout as layout_lib
from hysparse.footprint.kept import Kept
from hysparse.footprint.read import Precision, Source, read

_CONTEXTS = (4_096, 32_768, 131_072, 1_048_576)


@dataclasses.dataclass(frozen=True)
class Footprint:
  """Bytes of one sequence's attention state.

  Attributes:
    model: what is counted.
    contexts: context lengths in tokens at which totals are given.
  """

  model: Kept
  contexts: tuple[int, ...]

  @property
  def layout(self) -> layout_lib.StateLayout:
    return self.model.layout

  @property
  def global_bytes_per_token(self) -> Fraction:
    return self.layout.global_bytes_per_token

  @property
  def bounded_bytes(self) -> int:
    return self.layout.bounded_bytes

  def bytes_at(self, tokens: int) -> dict[str, int]:
    """Bytes by lifetime after `tokens` tokens of context, and their total.

    Scratch is that of a call with one token. Begun blocks of the paged cache count in the block
    table only: the allocator's slack is not the model's.
    """
    parts = {
      lifetime: self.layout.bytes_at(lifetime, tokens) for lifetime in get_args(layout_lib.Lifetime)
    }
    return {**parts, "total": sum(parts.values())}

  def to_dict(self) -> dict[str, Any]:
    """Everything as plain numbers and texts, JSON-ready."""
    config = self.model.config
    ours = config and {
      "schedule": config.schedule,
      "engram_layers": list(config.engram_layers),
    }
    return {
      "model": self.model.name,
      "family": self.model.family,
      "precision": self.model.precision,
      **(ours or {}),
      "global_bytes_per_token": plain(self.global_bytes_per_token),
      "bounded_bytes": self.bounded_bytes,
      "block_tokens": self.layout.block_tokens,
      "components": [
        {
          "name": c.name,
          "layers": list(c.layers),
          "format": c.format,
          "lifetime": c.lifetime,
          "row": {part.name: {"shape": list(part.shape), "dtype": part.dtype} for part in c.row},
          "bytes_per_row": c.row_bytes,
          "rows_per_token": plain(c.rows_per_token),
          "rows": c.rows,
          "bytes_per_token": plain(c.bytes_per_token),
          "bytes": c.bytes_at(0),
        }
        for c in self.layout
      ],
      "contexts": {str(tokens): self.bytes_at(tokens) for tokens in self.contexts},
    }


def footprint(source: Source, *, precision: Precision = None, page: int | None = None) -> Footprint:
  """Counts the attention state of one sequence, at the usual context lengths and the longest.

  Arguments as in `read`.
  """
  model = read(source, precision=precision, page=page)
  longest = model.max_positions or _CONTEXTS[-1]
  contexts = (*(n for n in _CONTEXTS if n < longest), longest)
  return Footprint(model, contexts)


def plain(value: Fraction) -> int | float:
  """A whole number where it is one."""
  return value.numerator if value.denominator == 1 else float(value)
