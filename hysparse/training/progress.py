"""Time and what a person sees of a run: one line that is rewritten, or plain lines in a file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO


class Stopwatch:
  """Seconds spent training: it stands still during compilation, evaluation and checkpoints."""

  def __init__(self):
    self._seconds = 0.0
    self._since: float | None = None

  @property
  def running(self) -> bool:
    return self._since is not None

  def start(self) -> None:
    if self._since is None:
      self._since = time.perf_counter()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Goes on afterwards if it was running."""
    running, self._seconds, self._since = self.running, self.seconds, None
    yield
    if running:
      self.start()

  @property
  def seconds(self) -> float:
    running = 0.0 if self._since is None else time.perf_counter() - self._since
    return self._seconds + running


class Console:
  """Messages line by line and, on a terminal, a progress line kept below them."""

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream or sys.stdout
    self._live = self._stream.isatty()
    self._width = 0  # characters of the progress line on the screen

  def say(self, text: str) -> None:
    """A message that stays."""
    self._clear()
    print(text, file=self._stream, flush=True)

  def progress(self, text: str) -> None:
    """A line that the next one replaces on a terminal."""
    if not self._live:
      self.say(text)
      return
    self._clear()
    print(text, end="", file=self._stream, flush=True)
    self._width = len(text)

  def close(self) -> None:
    """Leaves the progress line on the screen."""
    if self._width:
      print(file=self._stream, flush=True)
    self._width = 0

  def _clear(self) -> None:
    if self._width:
      print("\r" + " " * self._width + "\r", end="", file=self._stream)
    self._width = 0


def duration(seconds: float) -> str:
  """Hours, minutes and seconds: "42 s", "3:07", "1:02:45"."""
  whole = max(0, round(seconds))
  minutes, seconds = divmod(whole, 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}" if minutes else f"{seconds} s"
