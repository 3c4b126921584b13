"""The host side of the hash: primes, multipliers and row offsets of every Engram layer's table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

# The remainder is taken byte by byte in 32 bits: (prime - 1) * 2^8 + 255 must stay below 2^32.
PRIME_LIMIT = 2**24
ROW_LIMIT = 2**31  # rows are int32
ID_LIMIT = 2**31  # so are compressed ids


@dataclasses.dataclass(frozen=True)
class HashConstants:
  """The hash of one Engram layer and the layout of its table; hashable, so it can be static.

  The table has one region of `primes[n][i]` rows for each order n (2-grams first) and head i.

  Attributes:
    layer: layer number, on which the multipliers depend.
    multipliers: one odd number below 2^63 for each look-back 0..N-1.
    primes: rows of every region, [orders][heads].
  """

  layer: int
  multipliers: tuple[int, ...]
  primes: tuple[tuple[int, ...], ...]

  @property
  def columns(self) -> int:
    """Rows that one token looks up: orders x heads."""
    return sum(len(heads) for heads in self.primes)

  @property
  def offsets(self) -> tuple[tuple[int, ...], ...]:
    """First row of every region, [orders][heads]."""
    starts = itertools.accumulate(itertools.chain.from_iterable(self.primes), initial=0)
    return tuple(tuple(itertools.islice(starts, len(heads))) for heads in self.primes)

  @property
  def rows(self) -> int:
    """Rows of the whole table."""
    return sum(map(sum, self.primes))


def hash_constants(
  layers: Sequence[int], max_ngram: int, heads: int, vocab: int, compressed_vocab: int
) -> tuple[HashConstants, ...]:
  """The constants of each of `layers`, in the order given.

  Args:
    layers: numbers of the model's Engram layers.
    max_ngram: N, the longest n-gram; the orders are 2..N.
    heads: hash functions of each order.
    vocab: regions have successive primes of at least this many rows.
    compressed_vocab: compressed token ids are below this.

  Raises:
    ValueError: a value out of range, primes of 2^24 or more, or 2^31 rows or more.

  Source: arXiv 2609.19969 and the released code; the published sizes are 384,006,168 rows for
  layer 1 and 384,016,682 for layer 14.
  """
  for name, value, legal in (
    ("engram_max_ngram", max_ngram, max_ngram >= 2 or "at least 2"),
    ("engram_heads", heads, heads >= 1 or "at least 1"),
    ("engram_vocab", vocab, 1 <= vocab < PRIME_LIMIT or f"in 1..{PRIME_LIMIT - 1}"),
    ("engram_compressed_vocab", compressed_vocab,
     1 <= compressed_vocab <= ID_LIMIT or f"in 1..{ID_LIMIT}"),
  ):  # fmt: skip
    if legal is not True:
      raise ValueError(f"{name}: is {value}; must be {legal}")
  orders = max_ngram - 1
  # Each order of each layer takes the smallest primes that nobody took before: together that is
  # one ascending run.
  primes = primes_from(vocab, len(layers) * orders * heads).reshape(len(layers), orders, heads)
  if primes.size and primes.max() >= PRIME_LIMIT:
    raise ValueError(
      f"engram_vocab: {vocab} leads to the prime {primes.max()}; the device hash is exact for"
      f" primes below 2^24 ({PRIME_LIMIT})"
    )
  constants = tuple(
    HashConstants(
      layer=int(layer),
      multipliers=_multipliers(layer, max_ngram, compressed_vocab),
      primes=tuple(tuple(row) for row in primes[i].tolist()),
    )
    for i, layer in enumerate(layers)
  )
  for table in constants:
    if table.rows >= ROW_LIMIT:
      raise ValueError(
        f"engram_vocab: {vocab} gives layer {table.layer} a table of {table.rows} rows; rows are"
        " int32, so there must be fewer than 2^31"
      )
  return constants


def _multipliers(layer: int, max_ngram: int, compressed_vocab: int) -> tuple[int, ...]:
  """Odd and so small that an id times a multiplier stays below 2^63."""
  bound = max(1, (2**63 - 1) // compressed_vocab // 2)
  drawn = np.random.default_rng(10007 * int(layer)).integers(0, bound, size=max_ngram)
  return tuple(int(m) * 2 + 1 for m in drawn)


def primes_from(start: int, count: int) -> np.ndarray:
  """The `count` smallest primes that are at least `start`, ascending, int64."""
  found = np.zeros(0, np.int64)
  low = max(start, 2)
  while len(found) < count:
    # About one number in ln(n) is prime: this width nearly always holds all that are missing.
    high = low + 2 * math.ceil((count - len(found)) * math.log(low + 2)) + 64
    is_prime = np.ones(high - low, bool)
    for divisor in range(2, math.isqrt(high) + 1):
      first = max(divisor * divisor, -(-low // divisor) * divisor)
      is_prime[first - low :: divisor] = False
    found = np.concatenate([found, low + np.flatnonzero(is_prime)])
    low = high
  return found[:count]
