"""Rows of a pool in HBM, fetched one by one into VMEM of a TPU.

Words have 32 bits there, and a word holds the same channel of neighbouring rows: of 4 rows of
bytes, of 2 of bfloat16. A row alone cannot be addressed, so the pool is seen as words
[R / 4, lanes]: a transfer brings the word row that has the wanted row in it, and a shift by the
row's place takes it out: 4 packed rows move for each selected one, in pieces of 512 bytes. The pool
stays where and as it is. Addresses are computed from word rows, in words, as unsigned numbers of 32
bits: they reach 16 GiB of a part, and more is refused.
(Only scales, with fewer channels than a tile has lanes, XLA keeps transposed in the arguments of a
program: it lays them out anew once, before the loop that generates tokens, say.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hysparse_kernels import blocks, dispatch
from hysparse_kernels.formats import Stored

_REACH = 4 << 32  # bytes
_LANES = 128
_UNROLL = 8  # transfers that are started without a jump


def whole_words(pool: Stored) -> Stored:
  """The pool with as many rows as fill words: itself, where its number of rows is a multiple.

  Raises:
    BackendError: a pool beyond the reach of addresses.
  """

  def filled(part: jax.Array) -> jax.Array:
    rows, lanes = part.shape
    size = rows * blocks.count(lanes, _LANES) * _LANES * part.dtype.itemsize
    if size > _REACH:
      raise dispatch.BackendError(
        f"sparse_attention: 'pallas_tpu' addresses {_REACH >> 30} GiB of a pool, this one has "
        f"{size / 2**30:.1f}"
      )
    missing = -rows % _in_a_word(part)
    return jnp.pad(part, [(0, missing), (0, 0)]) if missing else part

  return jax.tree.map(filled, pool)


def buffers(pool: Stored, slots: int, count: int) -> Stored:
  """Scratch memory for words of `count` rows, in several slots."""
  return jax.tree.map(lambda part: pltpu.VMEM((slots, count, part.shape[-1]), jnp.int32), pool)


def words_of(pool: Stored, rows: jax.Array) -> jax.Array:
  """The word rows that have these rows of a pool in them; for -1 those of row 0."""
  part = next(iter(pool.parts.values()))
  return jnp.clip(rows, 0, pool.shape[0] - 1) >> _in_a_word(part).bit_length() - 1


def places_of(rows: jax.Array) -> jax.Array:
  """Where in their words rows lie, of every kind of part; -1 for none."""
  return jnp.where(rows < 0, -1, rows & 3)


@dataclasses.dataclass(frozen=True)
class Fetcher:
  """Brings rows into a slot of buffers.

  Attributes:
    pool: references to the parts in HBM, of `whole_words`.
    buffers: references, of `buffers`.
    arrived: DMA semaphores, one a slot.
  """

  pool: Stored
  buffers: Stored
  arrived: jax.Ref

  def start(self, word: Callable[[jax.Array], jax.Array], slot: jax.Array | int) -> None:
    """Begins to fetch word row word(k), of `words_of`, to every place k of the slot."""
    pairs = list(zip(jax.tree.leaves(self.pool), jax.tree.leaves(self.buffers), strict=True))

    def start_one(k, _):
      for part, buffer in pairs:
        source = part.bitcast(jnp.int32).at[pl.ds(word(k), 1)]
        place = buffer.at[slot, pl.ds(k, 1)]
        pltpu.make_async_copy(source, place, self.arrived.at[slot]).start()

    jax.lax.fori_loop(0, pairs[0][1].shape[1], start_one, None, unroll=_UNROLL)

  def wait(self, slot: jax.Array) -> None:
    """Until all rows of the slot are there."""
    for buffer in jax.tree.leaves(self.buffers):
      whole = buffer.at[slot]  # names the number of bytes to wait for; nothing is copied
      pltpu.make_async_copy(whole, whole, self.arrived.at[slot]).wait()

  def tile(self, slot: jax.Array, first: int, places_Nx1: jax.Array) -> Stored:
    """Rows from place `first` of the slot on: codes as int32, values as float32.

    Args:
      places_Nx1: in their words, see `places_of`.
    """

    def take(part, buffer):
      words = buffer[slot, first : first + places_Nx1.shape[0]]
      if _in_a_word(part) == 1:
        return jax.lax.bitcast_convert_type(words, jnp.float32)
      bits = 32 // _in_a_word(part)
      place_Nx1 = places_Nx1 & (_in_a_word(part) - 1)
      own = jax.lax.shift_right_logical(words, place_Nx1 * bits + jnp.zeros_like(words))
      own &= (1 << bits) - 1
      return own if bits == 8 else jax.lax.bitcast_convert_type(own << 16, jnp.float32)

    return jax.tree.map(take, self.pool, self.buffers)


def _in_a_word(part: jax.Array | jax.Ref) -> int:
  return 4 // part.dtype.itemsize
