"""Lines on how far long work is."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 10.0


def size(nbytes: float) -> str:
  """Bytes for a person."""
  return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


class Progress:
  """Counts bytes and now and then says how many, how fast and how long it will still take."""

  def __init__(self, total: int, say: Callable[[str], None]):
    self._total, self._say, self._done = total, say, 0
    self._start = self._told = time.monotonic()

  def add(self, nbytes: int) -> None:
    self._done += nbytes
    now = time.monotonic()
    if now - self._told < _EVERY_S:
      return
    self._told = now
    speed = self._done / (now - self._start)
    left = int((self._total - self._done) / speed)
    self._say(
      f"{size(self._done)} of {size(self._total)}, {size(speed)}/s,"
      f" {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
    )
