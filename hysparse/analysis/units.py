"""Numbers as people read them."""

from __future__ import annotations

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float) -> str:
  """Few digits: 3.51, 890, 65.5."""
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(value: float) -> str:
  """Bytes with their decimal unit: 933 MB."""
  power = 0
  while value >= 1000 and power < len(_BYTES) - 1:
    value, power = value / 1000, power + 1
  return f"{value:.0f} B" if power == 0 else f"{value:.3g} {_BYTES[power]}"


def tokens(value: float) -> str:
  """Tokens of context, in the powers of two that contexts come in: 512, 4K, 1M."""
  for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
    if value >= unit:
      return f"{value / unit:.3g}{name}"
  return f"{value:.0f}"


def cell(value: object) -> str:
  """Of a table: whole numbers with commas, others with two digits, nothing for NaN."""
  if value == 0:
    return "0"
  if isinstance(value, float):
    return "" if value != value else f"{value:,.2f}"
  return f"{value:,}" if isinstance(value, int) else str(value)
