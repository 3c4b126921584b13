"""The tensors of a folder of safetensors files, by name, without loading what is not asked for.

The safetensors library cannot hand BF16 and FP8 tensors to NumPy, so files are read here:

    8 bytes N, little-endian | N bytes of JSON: {name: {dtype, shape, data_offsets}} | the data

Codes and scales come as uint8, BF16 as ml_dtypes' bfloat16.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hysparse import json_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_BLOCK_BYTES = 1 << 17  # read at once: stays in a core's cache while it is checked and placed
_ITEM_BITS = {
  **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
  **dict.fromkeys(("F32", "I32", "U32"), 32),
  **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
  **dict.fromkeys(("BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8"), 8),
  **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
  "F4": 4,
}
_NUMPY = {
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F32": np.dtype(np.float32),
  **dict.fromkeys(("F8_E4M3", "F8_E8M0", "I8"), np.dtype(np.uint8)),
}


class FolderError(ValueError):
  """A released folder that cannot be used.

  Attributes:
    problems: all that is wrong with it, a line each.
  """

  def __init__(self, folder: pathlib.Path, problems: Iterable[str]):
    self.problems = tuple(problems)
    several = f"{folder}: {len(self.problems)} problems\n  " + "\n  ".join(self.problems)
    super().__init__(several if len(self.problems) > 1 else f"{folder}: {self.problems[0]}")


def shortened(texts: Iterable[str], separator: str = ", ", most: int = 4) -> str:
  """The first few of a list and how many more there are."""
  texts = list(texts)
  more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
  return separator.join(texts[:most] + more)


class Stored(NamedTuple):
  """Where a tensor lies: `nbytes` at `offset` of `file`."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int
  nbytes: int

  def __str__(self) -> str:
    return f"{self.dtype} {list(self.shape)}"

  def read(self) -> np.ndarray:
    """All of the tensor.

    Raises:
      OSError: the file cannot be read, or has become shorter than it was.
    """
    out = np.empty(self.shape, _NUMPY[self.dtype])
    for rows, block in self.blocks():
      out[rows] = block
    return out

  def blocks(self, multiple: int = 1) -> Iterator[tuple[slice, np.ndarray]]:
    """The tensor a block at a time: (rows of the first axis, their values).

    Args:
      multiple: every block but the last has a multiple of so many rows.

    Raises:
      OSError: as `read`.
    """
    with self.file.open("rb", buffering=0) as file:
      file.seek(self.offset)
      for rows in _spans(self.shape[0], self.nbytes, multiple):
        block = np.empty((rows.stop - rows.start, *self.shape[1:]), _NUMPY[self.dtype])
        if file.readinto(block.reshape(-1).view(np.uint8)) != block.nbytes:
          raise OSError(errno.EIO, "the file ended early")
        yield rows, block

  def map(self) -> np.ndarray:
    """The tensor as a read-only view of the file, for rows asked for at random.

    Only the pages of touched rows are read; the usual reading ahead would fetch hundreds of rows
    with each.
    """
    skipped = self.offset % mmap.ALLOCATIONGRANULARITY
    place = {"length": self.nbytes + skipped, "offset": self.offset - skipped}
    with self.file.open("rb") as file:
      memory = mmap.mmap(file.fileno(), access=mmap.ACCESS_READ, **place)
    memory.madvise(mmap.MADV_RANDOM)
    return np.ndarray(self.shape, _NUMPY[self.dtype], memory, skipped)


def row_blocks(array: np.ndarray, multiple: int = 1) -> Iterator[tuple[slice, np.ndarray]]:
  """`Stored.blocks` of an array in memory."""
  for rows in _spans(len(array), array.nbytes, multiple):
    yield rows, array[rows]


def _spans(count: int, nbytes: int, multiple: int) -> Iterator[slice]:
  step = max(_BLOCK_BYTES * count // nbytes // multiple, 1) * multiple
  for start in range(0, count, step):
    yield slice(start, min(start + step, count))


class Shards:
  """The tensors of a folder, found through its index or in its only file.

  Opening reads headers only and raises nothing: what is wrong goes to `problems`.

  Attributes:
    tensors: by released name.
    lost: released names that the index places in files which are missing or unreadable.
    index: the file of each tensor, by the name's spelling in the folder.
    problems: a line each.
  """

  def __init__(self, folder: pathlib.Path):
    self.tensors: dict[str, Stored] = {}
    self.lost: set[str] = set()
    self.problems: list[str] = []
    self.index = self._read_index(folder)
    placed: dict[str, set[str]] = {}  # file -> spelled names, none if no index tells
    for name, file in self.index.items():
      placed.setdefault(file, set()).add(name)
    if not self.index:  # where one is needed, what is wrong with the files is told all the same
      files = folder.glob("*.safetensors") if self.problems else [folder / SINGLE]
      placed = {path.name: set() for path in files}
    spellings: dict[str, str] = {}
    for file, names in sorted(placed.items()):
      try:
        found, problems = read_header(folder / file)
      except ValueError as error:
        count = f" ({len(names):,} tensors of the index)" if names else ""
        self.problems.append(f"{file}: {error}{count}")
        self.lost |= {released_name(name) for name in names}
        continue
      self.problems += [f"{file}: {problem}" for problem in problems]
      if names:
        self._compare(file, names, found.keys())
      else:
        self.index |= dict.fromkeys(found, file)
      for spelled, stored in found.items():
        name = released_name(spelled)
        if name in self.tensors:
          self.problems.append(f"{file}: {spelled} is a second {name}, beside {spellings[name]}")
        self.tensors[name], spellings[name] = stored, spelled

  def _compare(self, file: str, listed: set[str], found: Iterable[str]) -> None:
    """The index and a file must tell the same."""
    absent, unlisted = sorted(listed - set(found)), sorted(set(found) - listed)
    if absent:
      self.problems.append(f"{file}: the index places here what it lacks: {shortened(absent)}")
    if unlisted:
      self.problems.append(f"{file}: holds what the index does not place here: "
                           f"{shortened(unlisted)}")  # fmt: skip

  def _read_index(self, folder: pathlib.Path) -> dict[str, str]:
    """Spelled name -> file; empty without an index or if it cannot be read."""
    path = folder / INDEX
    if not path.exists():
      if not (folder / SINGLE).exists():
        self.problems.append(f"has neither {INDEX} nor {SINGLE}")
      return {}
    try:
      return read_index(path)
    except ValueError as error:
      self.problems.append(str(error))
      return {}


_HF_WORDS = {
  "self_attn": "attn",
  "mlp": "ffn",
  "weight_scale_inv": "scale",
  "e_score_correction_bias": "bias",
}
_TIED = re.compile(r"mtp\.\d+\.(embed|head)\..*")


def released_name(spelled: str) -> str:
  """A name in the released spelling; names in Hugging Face's style are translated."""
  words = spelled.removeprefix("model.").split(".")
  kept = ("mlp",) if words[0] == "vision" else ()
  return ".".join(word if word in kept else _HF_WORDS.get(word, word) for word in words)


def is_tied_copy(name: str) -> bool:
  """Draft layers share the embedding and the head; copies that a folder may hold are not read."""
  return _TIED.fullmatch(name) is not None


def read_index(path: pathlib.Path) -> dict[str, str]:
  """The file of each tensor, by the spelling of its name, from an index.

  Raises:
    ValueError: what cannot be read, or a file that is not a name beside the index.
  """
  try:
    files = json_text.parse(path.read_bytes())["weight_map"]
    if not isinstance(files, dict) or not files:
      raise ValueError("weight_map names no tensors")
    for name, file in files.items():
      if not isinstance(file, str) or pathlib.PurePath(file).name != file:
        raise ValueError(f"weight_map places {name} in {file!r}, which is no file name")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{INDEX}: cannot be read ({type(error).__name__}: {error})") from None
  return files


def read_header(path: pathlib.Path) -> tuple[dict[str, Stored], list[str]]:
  """The tensors of one file by their spelled names, and what is wrong with the file.

  Raises:
    ValueError: no header can be read; without the path.
  """
  try:
    with path.open("rb") as file:
      size = path.stat().st_size
      length = int.from_bytes(file.read(8), "little")
      if size < 8 or length > size - 8:
        raise ValueError(f"is cut short: {size:,} bytes do not hold its header")
      if length > _LONGEST_HEADER:
        raise ValueError(f"has a header of {length:,} bytes; is no safetensors file")
      header = json_text.parse(file.read(length))
  except FileNotFoundError:
    raise ValueError("is missing") from None
  except OSError as error:
    raise ValueError(f"cannot be read: {error.strerror}") from None
  except UnicodeDecodeError:
    raise ValueError("has a broken header: not UTF-8") from None
  except json.JSONDecodeError as error:
    raise ValueError(f"has a broken header: {error}") from None
  if not isinstance(header, dict):
    raise ValueError("has a broken header: no object at its top")
  header.pop("__metadata__", None)

  found, broken = {}, []
  for name, entry in header.items():
    problem = _problem_of(entry)
    if problem:
      broken.append(f"{name} {problem}")
    else:
      start, stop = entry["data_offsets"]
      place = (8 + length + start, stop - start)
      found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), *place)
  problems = [f"has a broken header: {shortened(broken, '; ')}"] if broken else []
  end = 8 + length
  for name, stored in sorted(found.items(), key=lambda item: item[1].offset):
    if stored.offset != end and not broken:
      word = "overlaps" if stored.offset < end else "leaves a gap to"
      problems.append(f"has a broken header: {name} {word} what lies before it")
    end = max(end, stored.offset + stored.nbytes)
  if size < end:
    problems.append(f"is cut short: {size:,} bytes of {end:,}")
  elif size > end and not broken:
    problems.append(f"is too long: {size:,} bytes, of which {end:,} are tensors")
  return found, problems


def _problem_of(entry: Any) -> str | None:
  """What is wrong with one tensor's entry in a header."""
  if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
    return "lacks dtype, shape or data_offsets"
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
    return f"has the unknown dtype {dtype!r}"
  for value in (shape, offsets):
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
      return f"has {value!r} where whole numbers belong"
  if len(offsets) != 2 or offsets[0] > offsets[1]:
    return f"has the offsets {offsets}"
  if math.prod(shape) * _ITEM_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
    return f"takes {offsets[1] - offsets[0]:,} bytes, which is not {dtype} {shape}"
  return None
