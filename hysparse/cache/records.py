"""One sequence's attention state as bytes, outside of any cache, and back.

A record holds, for every component of the layout, the rows that the sequence has: exactly the bytes
that the layout counts. What addresses them (block table, ring tags, status) is not part of it: rows
come back to wherever a slot has its blocks, and rings get the tags that their length implies.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from hysparse_kernels.formats import Stored
from hysparse_kernels.paged import Paged
from jaxtyping import UInt8

from hysparse.cache import layout as layout_lib
from hysparse.cache.allocate import Leaf, leaves
from hysparse.cache.state import Cache, CacheError
from hysparse.config import ModelConfig

_VERSION = "1"


@dataclasses.dataclass(frozen=True)
class Record:
  """The state of one sequence.

  Attributes:
    tokens: its length.
    layout: digest of the description of all components; it fits caches of the same only.
    rows: bytes [..., row bytes] of each array, by "component/first layer/part".
  """

  tokens: int
  layout: str
  rows: Mapping[str, UInt8[np.ndarray, "..."]]

  @property
  def bytes(self) -> int:
    """Of the rows."""
    return sum(x.nbytes for x in self.rows.values())

  def to_bytes(self) -> bytes:
    """As the content of a safetensors file."""
    about = {"version": _VERSION, "tokens": str(self.tokens), "layout": self.layout}
    return safetensors.numpy.save(dict(self.rows), about)

  @classmethod
  def from_bytes(cls, data: bytes) -> Record:
    """Reads what `to_bytes` wrote.

    Raises:
      CacheError: anything else, or another version of it.
    """
    try:
      rows = safetensors.numpy.load(data)
      about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
      version, tokens, layout = about["version"], int(about["tokens"]), about["layout"]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
      raise CacheError(f"record: is damaged, or no record ({error})") from None
    if version != _VERSION:
      raise CacheError(f"record: has version {version}; must be {_VERSION}")
    return cls(tokens, layout, rows)


def take(cache: Cache, config: ModelConfig, slot: int) -> Record:
  """The state of a sequence; waits for the arrays."""
  tokens, rows = int(cache.length_B[slot]), {}

  def read(leaf: Leaf, array: jax.Array) -> None:
    if _is_kept(leaf):
      axis, at = _place(leaf, cache, slot, tokens)
      rows[_name(leaf)] = array.take(jnp.asarray(at), axis)

  jax.tree.map(read, leaves(cache, config), cache)
  rows = {name: _as_bytes(x) for name, x in jax.device_get(rows).items()}
  return Record(tokens, _digest(cache, config), rows)


def put(cache: Cache, config: ModelConfig, slot: int, record: Record) -> Cache:
  """The cache with the state of a record in an empty slot that has blocks for its tokens.

  Uses up the cache that it is given, unless it refuses.

  Raises:
    CacheError: a record of another layout or with other rows than it says, too few blocks.
  """
  if record.layout != _digest(cache, config):
    raise CacheError("record: is of another model, schedule, precision or block size")
  room = int(cache.pages.room_B[slot])
  if room < record.tokens:
    raise CacheError(f"record: has {record.tokens} tokens; slot {slot} has blocks for {room}")

  def rows_of(leaf: Leaf, array: jax.Array) -> np.ndarray | None:
    """What the slot shall hold of an array; None: what it does."""
    name = leaf.component.name
    if name == "ring_tags":
      W = leaf.component.rows
      newest = record.tokens - 1 - (record.tokens - 1 - np.arange(W)) % W
      return np.where(newest >= 0, newest, leaf.part.fill)
    if name == "status":
      return np.asarray(record.tokens if leaf.part.name == "length" else False)
    if not _is_kept(leaf):
      return None
    axis, at = _place(leaf, cache, slot, record.tokens)
    shape = jax.eval_shape(lambda x: x.take(at, axis), array).shape
    rows = record.rows.get(_name(leaf))
    size = array.dtype.itemsize
    if rows is None or rows.shape != (*shape[:-1], shape[-1] * size) or rows.dtype != np.uint8:
      found = "none" if rows is None else f"{rows.dtype} {list(rows.shape)}"
      raise CacheError(f"record: {_name(leaf)} has {found}; must be bytes of {list(shape)}")
    return np.ascontiguousarray(rows).view(array.dtype)

  arrays, tree = jax.tree.flatten(cache)
  described = jax.tree.leaves(leaves(cache, config))
  # All of it is checked before anything is written.
  new = [rows_of(leaf, array) for leaf, array in zip(described, arrays, strict=True)]
  places = [_place(leaf, cache, slot, record.tokens) for leaf in described]
  return tree.unflatten(
    [
      array if rows is None else _write(array, at, rows, axis)
      for array, rows, (axis, at) in zip(arrays, new, places, strict=True)
    ]
  )


@functools.partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _write(array: jax.Array, at: jax.Array | int, rows: np.ndarray, axis: int) -> jax.Array:
  return array.at[(slice(None),) * axis + (at,)].set(rows)


def _is_kept(leaf: Leaf) -> bool:
  return leaf.component.lifetime in ("global", "bounded")


def _name(leaf: Leaf) -> str:
  first = f"{leaf.layers[0]}/" if leaf.layers else ""
  return f"{leaf.component.name}/{first}{leaf.part.name}"


def _place(leaf: Leaf, cache: Cache, slot: int, tokens: int) -> tuple[int, jax.Array | int]:
  """Where a sequence is in an array: along this axis at its rows of the pool, or at its slot."""
  component = leaf.component
  if component.lifetime != "global":
    return component.axes.index("batch"), slot
  block = int(cache.pages.tokens * component.rows_per_token)
  pages = Paged(Stored.plain(jnp.zeros((0, 0))), cache.pages.table_BxJ[slot, None], block)
  return 0, pages.locate(jnp.arange(component.rows_at(tokens))[None])[0]


def _as_bytes(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.uint8)


@functools.lru_cache
def _described(config: ModelConfig, precision: layout_lib.Precision, block_tokens: int) -> str:
  described = layout_lib.layout(config, precision, block_tokens=block_tokens)
  return hashlib.sha256(repr(described).encode()).hexdigest()


def _digest(cache: Cache, config: ModelConfig) -> str:
  return _described(config, cache.precision, cache.pages.tokens)
