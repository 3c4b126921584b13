"""Documents that can be read in any order: text files, JSONL, Parquet and ArrayRecord.

A document is record r of file f; a text file has one record. Random access lets the pipeline
shuffle globally and resume without reading what came before.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64

from hysparse import json_text

_SCAN_BYTES = 1 << 24  # read at once while looking for line ends
_CACHED_ROW_GROUPS = 4  # of Parquet files; a shuffled read needs many, so keep row groups small


class DataError(ValueError):
  """Data that cannot be read or used; one line that names the file or the field."""


class Documents(abc.ABC):
  """A sequence of texts in a fixed order.

  Args:
    root: names are relative to this folder, so that a copy elsewhere is the same data.
    files: paths below root.
    counts: records in each file.

  Attributes:
    fingerprint: digest of file names, sizes and record counts.
    file_bytes: what the files take on disk, together.
  """

  def __init__(self, root: Path, files: Sequence[Path], counts: Sequence[int]):
    self._files = list(files)
    self._names = [path.relative_to(root).as_posix() for path in files]
    self._ends = np.cumsum(np.asarray(counts, np.int64))
    sizes = [_size(path) for path in files]
    self.file_bytes = sum(sizes)
    entries = sorted(zip(self._names, sizes, map(int, counts), strict=True))
    self.fingerprint = hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:32]

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, index: int) -> str:
    """Text of a document.

    Raises:
      DataError: it cannot be read; names file and record.
    """
    file, record = self._locate(index)
    with _reading(self._files[file]):
      return self._read(file, record)

  def name(self, index: int) -> str:
    """File, relative to the root, and record number."""
    file, record = self._locate(index)
    return f"{self._names[file]}:{record}"

  def hashes(self) -> UInt64[np.ndarray, "N"]:
    """A stable hash of each document's name: of no absolute path, and whatever the order."""
    starts = np.concatenate([[0], self._ends[:-1]])
    return np.concatenate(
      [
        _mix(_name_key(name), np.arange(end - start))
        for name, start, end in zip(self._names, starts, self._ends, strict=True)
      ]
    )

  @abc.abstractmethod
  def _read(self, file: int, record: int) -> str:
    """Text of one record; may raise OSError or DataError."""

  def _locate(self, index: int) -> tuple[int, int]:
    if not 0 <= index < len(self):
      raise IndexError(f"document {index} of {len(self)}")
    file = int(np.searchsorted(self._ends, index, side="right"))
    return file, int(index - (self._ends[file - 1] if file else 0))


class TextFiles(Documents):
  """UTF-8 files, each a document."""

  def __init__(self, root: Path, files: Sequence[Path]):
    super().__init__(root, files, [1] * len(files))

  def _read(self, file: int, record: int) -> str:
    return _decode(self._files[file].read_bytes(), str(self._files[file]))


class JsonLines(Documents):
  """A JSON object on each line; `field` holds the text. Empty lines count for nothing."""

  def __init__(self, root: Path, files: Sequence[Path], field: str):
    self._field = field
    self._spans = [_lines(path) for path in files]
    super().__init__(root, files, [len(spans) for spans in self._spans])
    _try_first_records(self)

  def _read(self, file: int, record: int) -> str:
    start, end = map(int, self._spans[file][record])
    with open(self._files[file], "rb") as opened:
      opened.seek(start)
      line = opened.read(end - start)
    try:
      value = json_text.parse(line, repeats=True)
    except ValueError as error:
      raise DataError(f"{self._where(file, start)}: is not JSON: {error}") from None
    if not isinstance(value, dict) or self._field not in value:
      has = f"has {', '.join(value)}" if isinstance(value, dict) else "is no object"
      raise DataError(
        f"{self._where(file, start)}: no field {self._field!r} (data.text_field); the record {has}"
      )
    text = value[self._field]
    if not isinstance(text, str):
      raise DataError(
        f"{self._where(file, start)}: field {self._field!r} (data.text_field) is {text!r:.40}, not"
        " a text"
      )
    return _well_formed(text)

  def _where(self, file: int, offset: int) -> str:
    """File and line number, counted only when an error needs it."""
    with open(self._files[file], "rb") as opened:
      line = 1
      for start in range(0, offset, _SCAN_BYTES):
        line += opened.read(min(_SCAN_BYTES, offset - start)).count(b"\n")
    return f"{self._files[file]}:{line}"


class ParquetRows(Documents):
  """A text column of Parquet files, read by row groups."""

  def __init__(self, root: Path, files: Sequence[Path], field: str):
    self._field = field
    metadata = [_parquet_metadata(path, field) for path in files]
    self._group_ends = [
      np.cumsum([m.row_group(g).num_rows for g in range(m.num_row_groups)]) for m in metadata
    ]
    super().__init__(root, files, [m.num_rows for m in metadata])
    _try_first_records(self)

  def _read(self, file: int, record: int) -> str:
    ends = self._group_ends[file]
    group = int(np.searchsorted(ends, record, side="right"))
    column = _row_group(self._files[file], group, self._field)
    text = column[record - int(ends[group - 1] if group else 0)].as_py()
    if text is None:
      raise DataError(
        f"{self._files[file]}: row {record}: column {self._field!r} (data.text_field) is null"
      )
    return text


class ArrayRecords(Documents):
  """Records of ArrayRecord files; each is the UTF-8 bytes of a document."""

  def __init__(self, root: Path, files: Sequence[Path]):
    self._readers = [_array_record(path) for path in files]
    super().__init__(root, files, [len(reader) for reader in self._readers])
    _try_first_records(self)

  def _read(self, file: int, record: int) -> str:
    return _decode(self._readers[file][record], f"{self._files[file]}: record {record}")


class Selection:
  """Some of the documents, in a given order.

  Attributes:
    fingerprint: digest of the documents and of which ones they are.
    file_bytes: their share of what all documents take on disk, by number.
  """

  def __init__(self, documents: Documents, indices: Int64[np.ndarray, "n"]):
    self._documents = documents
    self._indices = indices
    self.file_bytes = documents.file_bytes * len(indices) // max(1, len(documents))
    digest = hashlib.sha256(documents.fingerprint.encode() + indices.tobytes())
    self.fingerprint = digest.hexdigest()[:32]

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> str:
    return self._documents[int(self._indices[index])]

  def name(self, index: int) -> str:
    return self._documents.name(int(self._indices[index]))


def _try_first_records(documents: Documents) -> None:
  """A wrong field should show before anything is computed, not when its file comes up."""
  starts = np.concatenate([[0], documents._ends[:-1]])
  for start in np.unique(starts[starts < documents._ends]):
    documents[int(start)]


@contextlib.contextmanager
def _reading(path: Path, *failures: type[Exception]) -> Iterator[None]:
  """What the system or a library says becomes one line that names the file."""
  try:
    yield
  except DataError:
    raise
  except (OSError, *failures) as error:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    raise DataError(f"{path}: cannot be read: {reason}") from None


def _size(path: Path) -> int:
  with _reading(path):
    return path.stat().st_size


def _decode(data: bytes, where: str) -> str:
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise DataError(f"{where}: is not UTF-8 text (byte {error.start})") from None


def _well_formed(text: str) -> str:
  """JSON can escape half a surrogate pair, which no UTF-8 can say; it becomes U+FFFD."""
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(path: Path) -> Int64[np.ndarray, "N 2"]:
  """Start and end of each line that is not empty, without holding the file in memory."""
  ends, size = [], 0
  with _reading(path), open(path, "rb") as file:
    while block := file.read(_SCAN_BYTES):
      ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size)
      size += len(block)
  ends_L = np.concatenate([*ends, [size]]).astype(np.int64)
  starts_L = np.concatenate([[0], ends_L[:-1] + 1])
  spans_Lx2 = np.stack([starts_L, ends_L], axis=1)
  return spans_Lx2[ends_L > starts_L]


def _parquet_metadata(path: Path, field: str):
  pyarrow, parquet = _pyarrow()
  with _reading(path, pyarrow.ArrowException), parquet.ParquetFile(path) as file:
    metadata, schema = file.metadata, file.schema_arrow
  if field not in schema.names:
    raise DataError(f"{path}: no column {field!r} (data.text_field); has {', '.join(schema.names)}")
  kind = schema.field(field).type
  if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
    raise DataError(f"{path}: column {field!r} (data.text_field) is {kind}, not text")
  return metadata


@functools.lru_cache(maxsize=_CACHED_ROW_GROUPS)
def _row_group(path: Path, group: int, field: str):
  pyarrow, parquet = _pyarrow()
  with _reading(path, pyarrow.ArrowException), parquet.ParquetFile(path) as file:
    return file.read_row_group(group, columns=[field]).column(0)


def _pyarrow():
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise DataError("Parquet needs the pyarrow package: pip install hysparse[train]") from None
  return pyarrow, parquet


def _array_record(path: Path):
  try:
    from grain.sources import ArrayRecordDataSource
  except ImportError:
    raise DataError("ArrayRecord needs the grain package: pip install hysparse[train]") from None
  with _reading(path, Exception):  # whatever the C++ reader raises
    return ArrayRecordDataSource(str(path))


def _name_key(name: str) -> np.uint64:
  return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _mix(key: np.uint64, records_N: Int64[np.ndarray, "N"]) -> UInt64[np.ndarray, "N"]:
  """SplitMix64 of the record numbers, from a state of the file's own."""
  z = key + (records_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))
