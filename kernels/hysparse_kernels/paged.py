"""Entries of several sequences in one pool of rows, found through a table of blocks."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels import arguments, compat
from hysparse_kernels.formats import Stored

NOWHERE = -1  # a block that a sequence does not have, an entry that is in none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
  """Entry j of sequence b is pool row `table[b, j // block] * block + j % block`.

  Attributes:
    rows: the pool [R, ...], R a multiple of `block`.
    table_BxJ: block of the pool that holds each block of entries, -1 for none. None: the sequences
      have one block each, in order.
    block: entries in a block (static).
  """

  rows: Stored
  table_BxJ: Int[Array, "B J"] | None
  block: int = dataclasses.field(metadata={"static": True})

  @classmethod
  def contiguous(cls, rows_BxT: Stored) -> Self:
    """Rows [B, T, ...] of sequences that are not paged."""
    return cls(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows_BxT), None,
               rows_BxT.shape[1])  # fmt: skip

  def check(self, sequences: int) -> None:
    """
    Raises:
      ValueError: a pool that does not have whole blocks, or no table for so many sequences.
    """
    arguments.whole("block", self.block)
    rows = self.rows.shape[0]
    if rows % self.block:
      raise ValueError(f"pool: has {rows} rows; must be whole blocks of {self.block} entries")
    if self.table_BxJ is None:
      if rows != sequences * self.block:
        raise ValueError(f"pool: has {rows} rows; without a table must be {sequences} blocks")
      return
    shape = self.table_BxJ.shape
    if len(shape) != 2 or shape[0] != sequences or not shape[1]:
      raise ValueError(f"table_BxJ: has shape {list(shape)}; must be [{sequences}, J]")
    arguments.integers(table_BxJ=self.table_BxJ)

  @property
  def entries(self) -> int:
    """T: entries of a sequence that there is room for."""
    return self.block if self.table_BxJ is None else self.table_BxJ.shape[1] * self.block

  def locate(self, ids: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """Pool rows of entries of each sequence; -1 for id -1 and for what has no block."""
    flat_BxN = ids.reshape(ids.shape[0], -1).astype(jnp.int32)
    at_BxN = flat_BxN // self.block
    if self.table_BxJ is None:
      block_BxN = jnp.arange(flat_BxN.shape[0], dtype=jnp.int32)[:, None]
    else:
      last = self.table_BxJ.shape[1] - 1
      table_BxJ = self.table_BxJ.astype(jnp.int32)
      block_BxN = jnp.take_along_axis(table_BxJ, jnp.clip(at_BxN, 0, last), axis=1)
    there_BxN = (flat_BxN >= 0) & (flat_BxN < self.entries) & (block_BxN >= 0)
    rows_BxN = jnp.where(there_BxN, block_BxN * self.block + flat_BxN % self.block, NOWHERE)
    return rows_BxN.reshape(ids.shape)

  def read(self, ids_N: Int[Array, " N"]) -> Stored:
    """The same entries of every sequence, [B, N, ...], packed; any row where there is none."""
    if self.table_BxJ is None:
      return jax.tree.map(lambda x: x[:, ids_N], self._apart())
    ids_BxN = jnp.broadcast_to(ids_N, (self.table_BxJ.shape[0], len(ids_N)))
    return self.rows[jnp.maximum(self.locate(ids_BxN), 0)]

  def read_groups(self, groups: Int[Array, "B ..."], size: int) -> Stored:
    """Groups of `size` consecutive entries, [B, ..., size, ...], packed; any rows where none are.

    Group g holds entries g * size .. g * size + size - 1. Where blocks hold whole groups, each is
    read in one piece.
    """
    if self.block % size:
      ids = groups[..., None] * size + jnp.arange(size)
      ids = jnp.where(groups[..., None] >= 0, ids, NOWHERE)
      return self.rows[jnp.maximum(self.locate(ids), 0)]
    first = self.locate(jnp.where(groups >= 0, groups * size, NOWHERE))
    at = jnp.maximum(first, 0) // size

    def groups_at(part: jax.Array) -> jax.Array:
      groups = part.reshape(-1, size, *part.shape[1:])
      if compat.platform() != "cpu":
        return groups[at]
      # XLA on CPU is several times slower where it gathers two axes of few bytes; on other
      # platforms another shape may be another layout, and so a copy of the pool.
      return groups.reshape(groups.shape[0], -1)[at].reshape(*at.shape, *groups.shape[1:])

    return jax.tree.map(groups_at, self.rows)

  def values(
    self, dtype: jnp.dtype, count_B: Int[Array, "B"] | None = None
  ) -> Float[Array, "B T ..."]:
    """All entries of every sequence, decoded side by side: as large as the context.

    Args:
      count_B: entries of each sequence; behind them stand zeros and nothing that others left.
    """
    ids_T = jnp.arange(self.entries)
    values = (self._apart() if self.table_BxJ is None else self.read(ids_T)).decode(dtype)
    if count_B is None:
      return values
    there_BxT = ids_T < count_B[:, None]
    return jnp.where(jnp.expand_dims(there_BxT, range(2, values.ndim)), values, 0)

  def put(
    self, ids_BxN: Int[Array, "B N"], rows_BxN: Stored, valid_BxN: Bool[Array, "B N"]
  ) -> Self:
    """Writes the valid rows at their places; what has no block is dropped."""
    at_BxN = self.locate(jnp.where(valid_BxN, ids_BxN, NOWHERE))
    at_BxN = jnp.where(at_BxN < 0, self.rows.shape[0], at_BxN)  # beyond the pool: dropped

    def write(pool: jax.Array, part: jax.Array) -> jax.Array:
      return pool.at[at_BxN].set(part.astype(pool.dtype), mode="drop")

    return dataclasses.replace(self, rows=jax.tree.map(write, self.rows, rows_BxN))

  def _apart(self) -> Stored:
    """[B, T, ...] of sequences that are not paged."""
    return jax.tree.map(lambda x: x.reshape(-1, self.block, *x.shape[1:]), self.rows)
