"""One sequence's attention state as bytes, outside of any cache, and back.

A record holds, for every component of the layout, the rows that the sequence has: exactly the bytes
that the layout counts. What addresses them (block table, ring tags, status) is not part of it: rows
come back to wherever a slot has its blocks, and rings get the tags that their length implies.

A record knows the config that it was made with, not the weights: whoever keeps records of several
checkpoints keeps them apart.
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
from hysparse_kernels.arguments import whole
from hysparse_kernels.formats import Stored
from hysparse_kernels.paged import NOWHERE, Paged
from jaxtyping import Int, UInt8

from hysparse.cache import layout as layout_lib
from hysparse.cache.allocate import Leaf, leaves
from hysparse.cache.state import Cache, CacheError
from hysparse.config import Config, ModelConfig

_VERSION = "2"


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """The state of one sequence.

  Attributes:
    tokens: its length.
    origin: digest of the model's config, the numerics and the layout; it fits caches of the same
      only.
    rows: bytes [..., row bytes] of each array, by "component/first layer/part".
  """

  tokens: int
  origin: str
  rows: Mapping[str, UInt8[np.ndarray, "..."]]

  def __post_init__(self) -> None:
    whole("record.tokens", self.tokens, 0, error=CacheError)

  @property
  def bytes(self) -> int:
    """Of the rows."""
    return sum(x.nbytes for x in self.rows.values())

  def to_bytes(self) -> bytes:
    """As the content of a safetensors file."""
    about = {"version": _VERSION, "tokens": str(self.tokens), "origin": self.origin}
    return safetensors.numpy.save(dict(self.rows), about | {"sha256": self._digest()})

  @classmethod
  def from_bytes(cls, data: bytes) -> Record:
    """Reads what `to_bytes` wrote.

    Raises:
      CacheError: anything else, another version of it, or bytes that have changed since.
    """
    data = bytes(data)
    try:
      rows = safetensors.numpy.load(data)
      about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
      if about["version"] != _VERSION:
        raise CacheError(f"record: has version {about['version']}; must be {_VERSION}")
      record, digest = cls(int(about["tokens"]), about["origin"], rows), about["sha256"]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
      raise CacheError(f"record: is damaged, or no record ({error})") from None
    if record._digest() != digest:
      raise CacheError("record: is damaged: its content does not have the sum that it names")
    return record

  def _digest(self) -> str:
    digest = hashlib.sha256(f"{self.tokens} {self.origin}".encode())
    for name, x in sorted(self.rows.items()):
      digest.update(f" {name} {x.dtype} {x.shape} ".encode())
      digest.update(np.ascontiguousarray(x))
    return digest.hexdigest()


def take(cache: Cache, config: Config, slot: int) -> Record:
  """The state of a sequence; waits for the arrays.

  Raises:
    CacheError: no such slot, a cache of another config or used up by a later call, a sequence that
      does not have all of its rows.
  """
  described = _described(cache, config, slot)
  tokens, rows = int(cache.length_B[slot]), {}
  room = int(cache.pages.room_B[slot])
  if room < tokens or bool(cache.error_B[slot]):
    raise CacheError(
      f"slot {slot}: has not all rows of its {tokens} tokens (blocks for {room}; cache.check() says"
      " more)"
    )

  def read(leaf: Leaf, array: jax.Array) -> None:
    if _is_kept(leaf):
      axis, at = _place(leaf, cache, slot, tokens)
      rows[_name(leaf)] = array.take(at, axis, mode="clip")

  jax.tree.map(read, described, cache)
  rows = jax.device_get(rows)
  for leaf in jax.tree.leaves(described):
    if _is_global(leaf):
      rows[_name(leaf)] = rows[_name(leaf)][: leaf.component.rows_at(tokens)]
  return Record(tokens, _origin(cache, config), {n: _as_bytes(x) for n, x in rows.items()})


def put(cache: Cache, config: Config, slot: int, record: Record) -> Cache:
  """The cache with the state of a record in an empty slot that has blocks for its tokens.

  Uses up the cache that it is given, unless it refuses.

  Raises:
    CacheError: no such slot, one that is not empty or shares its blocks, too few blocks; a record
      of another config or with other rows than it says; a cache of another config or used up.
  """
  if not isinstance(record, Record):
    raise TypeError(f"record: is a {type(record).__name__}; must be a Record (Record.from_bytes)")
  described = _described(cache, config, slot)
  if record.origin != _origin(cache, config):
    raise CacheError("record: is of another model, schedule, precision, numerics or block size")
  _check_empty(cache, slot, record.tokens)

  def rows_of(
    leaf: Leaf, array: jax.Array, axis: int, at: Int[np.ndarray, " N"] | int
  ) -> np.ndarray | None:
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
    *front, width = jax.eval_shape(lambda x: x.take(at, axis), array).shape
    if _is_global(leaf):
      front[0] = leaf.component.rows_at(record.tokens)
    want, rows = (*front, width * array.dtype.itemsize), record.rows.get(_name(leaf))
    if rows is None or rows.shape != want or rows.dtype != np.uint8:
      found = "none" if rows is None else f"{rows.dtype} {list(rows.shape)}"
      raise CacheError(f"record: {_name(leaf)} has {found}; must be uint8 {list(want)}")
    rows = np.ascontiguousarray(rows).view(array.dtype)
    if _is_global(leaf):  # as many as places, of which the last ones are outside
      rows = np.concatenate([rows, np.zeros((len(at) - len(rows), *rows.shape[1:]), rows.dtype)])
    return rows

  arrays, tree = jax.tree.flatten(cache)
  # All of it is checked before anything is written.
  flat = jax.tree.leaves(described)
  if extra := record.rows.keys() - {_name(leaf) for leaf in flat}:
    raise CacheError(f"record: has '{min(extra)}', which is no part of this model's state")
  places = [_place(leaf, cache, slot, record.tokens) for leaf in flat]
  new = [rows_of(leaf, x, *place) for leaf, x, place in zip(flat, arrays, places, strict=True)]
  return tree.unflatten(
    [
      array if rows is None else _write(array, at, rows, axis)
      for array, rows, (axis, at) in zip(arrays, new, places, strict=True)
    ]
  )


@functools.partial(jax.jit, static_argnames="axis", donate_argnums=0)
def _write(array: jax.Array, at: jax.Array | int, rows: np.ndarray, axis: int) -> jax.Array:
  return array.at[(slice(None),) * axis + (at,)].set(rows, mode="drop")


def _described(cache: Cache, config: Config, slot: int) -> Cache:
  """The leaves of a cache, after a look at the arguments."""
  if not isinstance(config, Config):
    raise TypeError(f"config: is a {type(config).__name__}; must be the whole Config")
  if any(x.is_deleted() for x in jax.tree.leaves(cache)):
    raise CacheError("cache: was used up by a call that returned a new one")
  described = leaves(cache, config.model)
  whole("slot", slot, 0, len(cache.length_B) - 1, error=CacheError)
  return described


def _check_empty(cache: Cache, slot: int, tokens: int) -> None:
  """Refuses a slot that has tokens, or cannot have so many."""
  if length := int(cache.length_B[slot]):
    raise CacheError(f"slot {slot}: has {length} tokens; must be empty (blocks.clear)")
  room = int(cache.pages.room_B[slot])
  if room < tokens:
    raise CacheError(f"record: has {tokens} tokens; slot {slot} has blocks for {room}")
  table = np.asarray(cache.pages.table_BxJ)
  shared = np.intersect1d(table[slot][table[slot] >= 0], np.delete(table, slot, 0))
  if len(shared):
    raise CacheError(f"slot {slot}: shares block {shared[0]} with another sequence")


def _is_kept(leaf: Leaf) -> bool:
  return leaf.component.lifetime in ("global", "bounded")


def _is_global(leaf: Leaf) -> bool:
  return leaf.component.lifetime == "global"


def _name(leaf: Leaf) -> str:
  first = f"{leaf.layers[0]}/" if leaf.layers else ""
  return f"{leaf.component.name}/{first}{leaf.part.name}"


def _place(
  leaf: Leaf, cache: Cache, slot: int, tokens: int
) -> tuple[int, Int[np.ndarray, " N"] | int]:
  """Where a sequence is in an array: along this axis at its rows of the pool, or at its slot.

  Rows are filled up, by an eighth (or seven rows) at most, with places outside of the pool: a
  program for each count of rows would be compiled otherwise.
  """
  component = leaf.component
  if component.lifetime != "global":
    return component.axes.index("batch"), slot
  block = int(cache.pages.tokens * component.rows_per_token)
  pages = Paged(Stored.plain(jnp.zeros((0, 0))), cache.pages.table_BxJ[slot, None], block)
  count = component.rows_at(tokens)
  step = 1 << max(3, count.bit_length() - 4)
  ids = np.arange(-(-count // step) * step)
  at = np.asarray(pages.locate(np.where(ids < count, ids, NOWHERE)[None])[0])
  return 0, np.where(at == NOWHERE, cache.pages.blocks * block, at)


def _as_bytes(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.uint8)


@functools.lru_cache
def _origin_of(
  model: ModelConfig, numerics: str, precision: layout_lib.Precision, block_tokens: int
) -> str:
  described = layout_lib.layout(model, precision, block_tokens=block_tokens)
  return hashlib.sha256(repr((described, model, numerics)).encode()).hexdigest()


def _origin(cache: Cache, config: Config) -> str:
  return _origin_of(config.model, config.train.numerics, cache.precision, cache.pages.tokens)
