"""Sizes that programs are compiled for: few of them, whatever lengths come."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A piece of a prompt.

  Attributes:
    start: its first token.
    count: its tokens.
    width: tokens that its program is compiled for; the rest is padding.
    more: the prompt goes on behind it.
  """

  start: int
  count: int
  width: int
  more: bool


def bucket(size: int, smallest: int, largest: int) -> int:
  """The smallest of `smallest`, twice that, ... that holds `size`, at most `largest`."""
  width = smallest
  while width < size:
    width *= 2
  return min(width, largest)


def chunks(tokens: int, largest: int, *, smallest: int = 16) -> list[Chunk]:
  """Cuts a prompt into pieces of `largest` tokens; what is left over comes first.

  So only the start of a prompt takes programs of other widths, when the cache is short: each width
  is compiled once. And the last piece is a whole one if the prompt has as many tokens, which
  replay needs: the decoder sees that piece only, and should see a whole window.
  """
  first = (tokens - 1) % largest + 1
  width = bucket(first, min(smallest, largest), largest)
  starts = range(first, tokens, largest)
  pieces = [Chunk(0, first, width, first < tokens)]
  return pieces + [Chunk(at, largest, largest, at + largest < tokens) for at in starts]
