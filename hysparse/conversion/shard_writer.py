"""Safetensors files that are written tensor by tensor, in any order, without holding them.

The safetensors library wants all tensors of a file at once and has no NumPy form of BF16 and FP8.
Every header is known beforehand, so here each tensor goes straight to its place:

    8 bytes N, little-endian | N bytes of JSON, filled up with spaces to 8 | the data

Tensors lie in the library's order: wide types first, then by name.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from jaxtyping import Shaped

from hysparse.conversion import shards
from hysparse.conversion.tensors import ITEM_BYTES

SHARD_BYTES = 5_000_000_000  # of a file, unless one tensor alone is larger

_FIRST_TYPES = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")  # the order of types in a file


class Entry(NamedTuple):
  """A tensor to be written; `dtype` is one of safetensors."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def in_shards(entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES) -> dict[str, str]:
  """The file of each tensor: as many in a file as fit, in their order."""
  shard, room, places = 0, 0, {}
  for name, entry in entries.items():
    if entry.nbytes > room:
      shard, room = shard + 1, shard_bytes
    places[name] = shard
    room -= entry.nbytes
  return {name: f"model-{place:05d}-of-{shard:05d}.safetensors" for name, place in places.items()}


def header(entries: Mapping[str, Entry]) -> tuple[bytes, dict[str, int]]:
  """What stands before the data of a file, and where in the file each tensor begins."""
  listed, offset, starts = {"__metadata__": {"format": "pt"}}, 0, {}
  for name in sorted(entries, key=lambda name: (_FIRST_TYPES.index(entries[name].dtype), name)):
    entry, starts[name] = entries[name], offset
    offset += entry.nbytes
    listed[name] = {
      "dtype": entry.dtype,
      "shape": list(entry.shape),
      "data_offsets": [starts[name], offset],
    }
  text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
  text += b" " * (-len(text) % 8)
  front = len(text).to_bytes(8, "little") + text
  return front, {name: len(front) + start for name, start in starts.items()}


class ShardWriter:
  """The files of one folder, open until all their tensors are there."""

  def __init__(self, folder: pathlib.Path, entries: Mapping[str, Entry], files: Mapping[str, str]):
    """
    Args:
      folder: exists.
      entries: tensors by name.
      files: the file of each.
    """
    self._entries, self._files = entries, files
    self._missing = {name: entry.nbytes for name, entry in entries.items()}
    self._starts: dict[str, int] = {}
    self._open: dict[str, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
      for file in dict.fromkeys(files.values()):
        front, starts = header({n: e for n, e in entries.items() if files[n] == file})
        opened = stack.enter_context((folder / file).open("xb", buffering=0))
        _write_all(opened, front)
        self._open[file] = opened
        self._starts |= starts
      self._stack = stack.pop_all()

  def write(self, name: str, blocks: Iterable[Shaped[np.ndarray, "..."]]) -> None:
    """Writes a tensor, given as consecutive parts of its data."""
    file = self._open[self._files[name]]
    file.seek(self._starts[name])
    for block in blocks:
      _write_all(file, np.ascontiguousarray(block).reshape(-1).view(np.uint8))
      self._missing[name] -= block.nbytes

  def close(self) -> None:
    """Makes sure that everything has reached the disk.

    Raises:
      RuntimeError: a tensor was not written, or not all of it.
    """
    wrong = [name for name, missing in self._missing.items() if missing]
    if wrong:
      raise RuntimeError(f"not written as announced: {shards.shortened(wrong)}")
    for file in self._open.values():
      os.fsync(file.fileno())

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error) -> None:
    with self._stack:
      if error[0] is None:
        self.close()


def index_text(entries: Mapping[str, Entry], files: Mapping[str, str]) -> str:
  """The content of model.safetensors.index.json."""
  total = sum(entry.nbytes for entry in entries.values())
  index = {"metadata": {"total_size": total}, "weight_map": {n: files[n] for n in sorted(files)}}
  return json.dumps(index, indent=1) + "\n"


def _write_all(file: BinaryIO, data: Sequence[int]) -> None:
  memory = memoryview(data)
  while memory:  # one write ends at 2 GB
    memory = memory[file.write(memory) :]
