"""Who holds which block of a paged cache: decided on the host, between compiled calls.

Sequences occupy slots of a cache and share its pools. Before a call the host reserves the blocks
that it may fill; a block with several holders is never written to, so a sequence that continues
another one's tokens gets a copy of the block that both have begun, and shares the full ones.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hysparse_kernels.arguments import whole
from jaxtyping import Array, Int

from hysparse.cache import slots as slots_lib
from hysparse.cache.ring import EMPTY, Ring
from hysparse.cache.state import Cache


class OutOfBlocks(RuntimeError):
  """There are not enough free blocks; nothing was changed."""


class BlockPool:
  """Hands out the blocks of a cache made with `allocate(..., pool_tokens=)`.

  It changes tables on the host; `install` puts them into a cache.
  """

  def __init__(self, cache: Cache):
    """Starts with all blocks free.

    Raises:
      ValueError: a cache whose sequences have blocks already.
    """
    if (np.asarray(cache.pages.table_BxJ) >= 0).any():
      raise ValueError(
        "BlockPool: the sequences of this cache have blocks already; allocate it with pool_tokens"
      )
    self.tokens = cache.pages.tokens
    self.slots, self.width = cache.pages.table_BxJ.shape
    self.blocks = cache.pages.blocks
    self._table = np.full((self.slots, self.width), -1, np.int32)
    self._held = np.zeros(self.slots, np.int64)  # blocks of each slot
    self._holders = np.zeros(self.blocks, np.int64)
    self._free = list(range(self.blocks))[::-1]  # the lowest is taken first

  @property
  def free(self) -> int:
    """Blocks that nobody holds."""
    return len(self._free)

  def missing(self, slot: int, tokens: int) -> int:
    """Blocks that a sequence needs beside its own to hold `tokens` tokens.

    Raises:
      ValueError: no such slot.
    """
    self.check_slot("slot", slot)
    return max(0, -(-tokens // self.tokens) - int(self._held[slot]))

  def check(self, tokens: int) -> None:
    """Refuses a sequence that would not fit if all blocks were free.

    Raises:
      OutOfBlocks: saying what there is.
      ValueError: tokens that are no number from 0 up.
    """
    whole("tokens", tokens, 0)
    needed = -(-tokens // self.tokens)
    if needed > self.width:
      raise OutOfBlocks(
        f"{tokens} tokens; a sequence of this cache has at most {self.width * self.tokens}"
      )
    if needed > self.blocks:
      raise OutOfBlocks(
        f"{tokens} tokens need {needed} blocks of {self.tokens} tokens; the pool has {self.blocks}"
      )

  def reserve(self, slot: int, tokens: int) -> None:
    """Sees to it that a sequence has blocks for its first `tokens` tokens.

    Raises:
      OutOfBlocks: not enough are free, or the table of a sequence has no place for so many.
      ValueError: no such slot.
    """
    try:
      self.check(tokens)
    except OutOfBlocks as error:
      raise OutOfBlocks(f"slot {slot}: {error}") from None
    missing, held = self.missing(slot, tokens), int(self._held[slot])
    if missing > self.free:
      raise OutOfBlocks(
        f"slot {slot}: {tokens} tokens need {missing} more blocks of {self.tokens} tokens;"
        f" {self.free} of {self.blocks} are free"
      )
    for place in range(held, held + missing):
      self._take(slot, place)

  def share(self, source: int, target: int, tokens: int) -> tuple[int, int] | None:
    """Gives an empty slot the first `tokens` tokens of another, without copying full blocks.

    Returns:
      (from, to), if the last block is only begun: its content is yet to be copied (`fork` does).

    Raises:
      OutOfBlocks: a block is needed for that and none is free.
      ValueError: no such slots, a target that holds blocks, tokens that the source has no blocks
        for.
    """
    self.check_slot("source", source)
    self.check_slot("target", target)
    if self._held[target]:
      raise ValueError(f"slot {target}: holds {self._held[target]} blocks; release it first")
    if whole("tokens", tokens, 0) > self._held[source] * self.tokens:
      raise ValueError(f"slot {source}: has no blocks for {tokens} tokens")
    full, begun = divmod(tokens, self.tokens)
    if begun and not self.free:
      raise OutOfBlocks(f"slot {target}: no block is free for the one that slot {source} has begun")
    for place in range(full):
      block = self._table[source, place]
      self._table[target, place] = block
      self._holders[block] += 1
    self._held[target] = full
    if not begun:
      return None
    return int(self._table[source, full]), self._take(target, full)

  def release(self, slot: int) -> None:
    """Gives all blocks of a sequence back; shared ones stay with their other holders.

    Raises:
      ValueError: no such slot.
    """
    self.check_slot("slot", slot)
    for block in self._table[slot, : self._held[slot]].tolist():
      self._holders[block] -= 1
      if not self._holders[block]:
        self._free.append(block)
    self._table[slot] = -1
    self._held[slot] = 0

  def live(self) -> int:
    """Blocks that somebody holds, shared ones once."""
    return self.blocks - self.free

  def install(self, cache: Cache) -> Cache:
    """The cache with the tables as they are now, on the devices where they were."""
    table = jnp.asarray(self._table)
    place = cache.pages.table_BxJ.sharding
    if len(place.device_set) > 1:
      table = jax.device_put(table, place)
    pages = dataclasses.replace(cache.pages, table_BxJ=table)
    return dataclasses.replace(cache, pages=pages)

  def check_slot(self, name: str, slot: int) -> None:
    """
    Raises:
      ValueError: no such slot.
    """
    whole(name, slot, 0, self.slots - 1)

  def _take(self, slot: int, place: int) -> int:
    block = self._free.pop()
    self._table[slot, place] = block
    self._holders[block] = 1
    self._held[slot] = place + 1
    return block


def fork(cache: Cache, pool: BlockPool, source: int, target: int) -> Cache:
  """Continues one sequence in another, empty slot as well: shares its full blocks, copies the rest.

  Waits for the length of the sequence; uses up the cache that it is given.

  Raises:
    OutOfBlocks, ValueError: see `BlockPool.share`.
  """
  pool.check_slot("source", source)
  begun = pool.share(source, target, int(cache.length_B[source]))
  block_from, block_to = begun or (0, 0)  # onto itself: nothing
  return pool.install(_copy(cache, source, target, block_from, block_to))


@functools.partial(jax.jit, donate_argnums=0)
def clear(cache: Cache, slots_N: Int[Array, "N"]) -> Cache:
  """Empties sequences: nothing that they held can be taken for a later one's.

  Uses up the cache that it is given.
  """

  def emptied(ring: Ring) -> Ring:
    return dataclasses.replace(ring, tags_BxW=ring.tags_BxW.at[:, slots_N].set(EMPTY))

  layers = tuple(
    layer if layer.window is None else dataclasses.replace(layer, window=emptied(layer.window))
    for layer in cache.layers
  )
  history = cache.history_BxL
  return dataclasses.replace(
    cache,
    layers=layers,
    drafts=None if cache.drafts is None else emptied(cache.drafts),
    history_BxL=None if history is None else history.at[slots_N].set(-1),
    length_B=cache.length_B.at[slots_N].set(0),
    error_B=cache.error_B.at[slots_N].set(False),
  )


@functools.partial(jax.jit, donate_argnums=0)
def _copy(
  cache: Cache, source: Int[Array, ""], target: Int[Array, ""], block_from: int, block_to: int
) -> Cache:
  """Bounded state of one slot to another, and one block to another in every pool."""

  def block(pool: jax.Array) -> jax.Array:
    rows = pool.shape[0] // cache.pages.blocks
    old = jax.lax.dynamic_slice_in_dim(pool, block_from * rows, rows)
    return jax.lax.dynamic_update_slice_in_dim(pool, old, block_to * rows, 0)

  cache = slots_lib.put(cache, jnp.stack([target]), slots_lib.take(cache, jnp.stack([source])))
  layers = tuple(
    dataclasses.replace(layer, pools=jax.tree.map(block, layer.pools)) for layer in cache.layers
  )
  return dataclasses.replace(cache, layers=layers)
