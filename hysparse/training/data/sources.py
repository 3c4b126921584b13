"""Where documents come from: the built-in corpus or files of the user's, and the held-out split.

The built-in corpus needs no download: the source files of the running Python's standard library
without its test folders, a document each. It differs between Python versions.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hysparse.config import DataConfig
from hysparse.training.data.documents import (
  ArrayRecords,
  DataError,
  Documents,
  JsonLines,
  ParquetRows,
  Selection,
  TextFiles,
)

_FORMATS = {  # by suffix; anything else is text
  ".jsonl": "jsonl",
  ".ndjson": "jsonl",
  ".parquet": "parquet",
  ".arrayrecord": "arrayrecord",
  ".array_record": "arrayrecord",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SNIFFED_BYTES = 8192  # a file with a zero byte among these is no text


def open_documents(config: DataConfig) -> Documents:
  """All documents of `config.source`, in the order of their file names.

  A folder is searched to its bottom, hidden files and folders left out. Read as text, its empty
  and binary files are left out too.

  Raises:
    DataError: nothing there, nothing readable there, or several formats there; see `documents.py`
      for what is wrong inside files.
  """
  if config.source == "stdlib":
    return _standard_library()
  path = Path(config.source).expanduser()
  if not path.exists():
    raise DataError(f"data.source: {config.source!r} does not exist")
  root = path if path.is_dir() else path.parent
  found = list(_walk(path)) if path.is_dir() else [path]
  _refuse_compressed(found)
  kind = config.format if config.format != "auto" else _common_format(config.source, found)
  if path.is_dir():
    found = [f for f in found if _format_of(f) == kind]
    if kind == "text":
      found = [f for f in found if _looks_like_text(f)]
  if not found:
    suffixes = [suffix for suffix, format in _FORMATS.items() if format == kind]
    named = f" ({', '.join(suffixes)})" if suffixes else ""
    raise DataError(f"data.source: {config.source!r} holds no {kind} file{named} with any content")
  if kind == "text":
    documents = TextFiles(root, found)
  elif kind == "arrayrecord":
    documents = ArrayRecords(root, found)
  else:
    documents = {"jsonl": JsonLines, "parquet": ParquetRows}[kind](root, found, config.text_field)
  if not len(documents):
    raise DataError(f"data.source: {config.source!r} holds no document")
  return documents


def split(documents: Documents, holdout: float) -> tuple[Selection, Selection]:
  """Training and held-out documents.

  A document is held out if the hash of its name falls below `holdout`, so it stays on its side
  whatever is added, removed or reordered around it.

  Raises:
    DataError: one side is empty.
  """
  # The top 53 bits of the hash as a float64 in [0, 1).
  held_N = (documents.hashes() >> np.uint64(11)) * 2.0**-53 < holdout
  train, heldout = (Selection(documents, np.flatnonzero(side)) for side in (~held_N, held_N))
  if not len(train) or not len(heldout):
    raise DataError(
      f"data.holdout: {holdout} of {len(documents)} documents leaves {len(train)} for training and"
      f" {len(heldout)} for evaluation; both need some: change it, or bring more documents"
    )
  return train, heldout


def _standard_library() -> Documents:
  root = Path(sysconfig.get_paths()["stdlib"])
  files = [f for f in _walk(root, skip=_NOT_LIBRARY) if f.suffix == ".py" and _is_utf8(f)]
  if not files:
    raise DataError(f"data.source: 'stdlib' finds no source files in {root}; name files of yours")
  return TextFiles(root, files)


def _walk(root: Path, skip: set[str] = frozenset()) -> Iterator[Path]:
  for folder, folders, files in os.walk(root, onerror=_refuse):
    folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip)
    for name in sorted(files):
      path = Path(folder, name)
      if not name.startswith(".") and path.is_file() and path.stat().st_size:
        yield path


def _refuse(error: OSError) -> None:
  raise DataError(f"{error.filename}: cannot be read: {error.strerror}")


def _refuse_compressed(files: list[Path]) -> None:
  for path in files:
    if path.suffix in _COMPRESSED and Path(path.stem).suffix in _FORMATS:
      raise DataError(f"{path}: is compressed as a whole, which allows no random access; unpack it")


def _format_of(path: Path) -> str:
  return _FORMATS.get(path.suffix.lower(), "text")


def _common_format(source: str, files: list[Path]) -> str:
  kinds = sorted({_format_of(path) for path in files}) or ["text"]
  if len(kinds) > 1:
    raise DataError(
      f"data.source: {source!r} holds files of formats {', '.join(kinds)}; set data.format to one"
    )
  return kinds[0]


def _looks_like_text(path: Path) -> bool:
  return b"\0" not in _read(path, _SNIFFED_BYTES)


def _is_utf8(path: Path) -> bool:
  try:
    _read(path).decode()
  except UnicodeDecodeError:
    return False
  return True


def _read(path: Path, count: int = -1) -> bytes:
  try:
    with open(path, "rb") as file:
      return file.read(count)
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error.strerror}") from None
