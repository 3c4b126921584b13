"""Documents of every format, the built-in corpus, the held-out split, and what is refused."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from hysparse.config import DataConfig
from hysparse.training.data import documents as documents_lib
from hysparse.training.data import sources
from hysparse.training.data.documents import DataError

TEXTS = [f"document {i}: naïve {'x' * (7 * i % 40)}\r\n\n\tend" for i in range(23)]


def _open(path, **fields):
  return sources.open_documents(DataConfig(source=str(path), **fields))


def _text(folder, texts):
  for i, text in enumerate(texts):
    path = folder / "sub" / f"{i:03}.txt" if i % 2 else folder / f"a{i:03}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def _jsonl(folder, texts, field="text", end="\n"):
  folder.mkdir(parents=True, exist_ok=True)
  for name, part in (("a.jsonl", texts[:9]), ("b.ndjson", texts[9:])):
    lines = [json.dumps({"id": i, field: t}) for i, t in enumerate(part)]
    (folder / name).write_text("\n\n".join(lines) + end)


def _parquet(folder, texts, field="text"):
  folder.mkdir(parents=True, exist_ok=True)
  for name, part in (("a.parquet", texts[:9]), ("b.parquet", texts[9:])):
    table = pa.table({field: part, "id": list(range(len(part)))})
    pq.write_table(table, folder / name, row_group_size=4)


def _array_record(folder, texts):
  folder.mkdir(parents=True, exist_ok=True)
  for name, part in (("a.arrayrecord", texts[:9]), ("b.array_record", texts[9:])):
    writer = ArrayRecordWriter(str(folder / name), "group_size:1")
    for text in part:
      writer.write(text.encode())
    writer.close()


WRITERS = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "arrayrecord": _array_record}


def _texts(documents):
  return [documents[i] for i in range(len(documents))]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("named", [False, True])
def test_formats_hold_the_same_documents(kind, named, tmp_path):
  WRITERS[kind](tmp_path / "data", TEXTS)
  documents = _open(tmp_path / "data", format=kind if named else "auto")
  assert sorted(_texts(documents)) == sorted(TEXTS)
  if kind != "text":  # records keep their order
    assert _texts(documents) == TEXTS
  order = np.random.default_rng(0).permutation(len(TEXTS))
  copy = pickle.loads(pickle.dumps(documents))  # what a worker process gets
  assert [copy[i] for i in order] == [documents[i] for i in order]
  with pytest.raises(IndexError):
    documents[len(TEXTS)]


@pytest.mark.parametrize("kind", WRITERS)
def test_single_file(kind, tmp_path):
  WRITERS[kind](tmp_path, TEXTS)
  file = sorted(p for p in tmp_path.iterdir() if p.is_file())[0]
  documents = _open(file)
  assert documents[0] == TEXTS[0]
  assert len(documents) == (1 if kind == "text" else 9)


@pytest.mark.parametrize("end", ["\n", "", "\n\n"])
def test_json_lines_end_as_they_like(end, tmp_path, monkeypatch):
  monkeypatch.setattr(documents_lib, "_SCAN_BYTES", 13)  # line ends fall everywhere in a block
  _jsonl(tmp_path, TEXTS, end=end)
  assert _texts(_open(tmp_path)) == TEXTS


def test_json_may_escape_half_a_character(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00 \\ud83d!"}\n')
  assert _open(tmp_path)[0] == "\U0001f600 \ufffd!"


def test_other_fields(tmp_path):
  _jsonl(tmp_path / "j", TEXTS, field="body")
  _parquet(tmp_path / "p", TEXTS, field="body")
  assert _texts(_open(tmp_path / "j", text_field="body")) == TEXTS
  assert _texts(_open(tmp_path / "p", text_field="body")) == TEXTS


def test_folders_of_text_leave_out_what_is_none(tmp_path):
  _text(tmp_path, TEXTS)
  (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\0\0")
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / ".hidden.txt").write_text("hidden")
  (tmp_path / ".git").mkdir()
  (tmp_path / ".git" / "config").write_text("hidden")
  assert sorted(_texts(_open(tmp_path))) == sorted(TEXTS)


def test_standard_library():
  documents = sources.open_documents(DataConfig())
  names = [documents.name(i) for i in range(len(documents))]
  assert len(names) > 400 and len(set(names)) == len(names)
  assert {"json/decoder.py:0", "abc.py:0"} <= set(names)
  for name in names:
    parts = Path(name.removesuffix(":0"))
    assert parts.suffix == ".py" and not parts.is_absolute()
    assert not {"test", "tests", "idle_test", "site-packages"} & set(parts.parts)
  text = documents[names.index("json/decoder.py:0")]
  assert "class JSONDecoder" in text
  assert documents.file_bytes == sum(len(t.encode()) for t in _texts(documents))
  _, heldout = sources.split(documents, 0.05)
  assert 0.02 < len(heldout) / len(documents) < 0.09


# --- The split -----------------------------------------------------------------------------------


def _sides(documents, holdout):
  return [
    {part.name(i): part[i] for i in range(len(part))} for part in sources.split(documents, holdout)
  ]


@pytest.mark.parametrize("kind", WRITERS)
def test_split_is_of_names_alone(kind, tmp_path):
  WRITERS[kind](tmp_path / "here", TEXTS)
  documents = _open(tmp_path / "here")
  train, heldout = _sides(documents, 0.3)
  assert not set(train) & set(heldout)
  assert sorted([*train.values(), *heldout.values()]) == sorted(TEXTS)
  # Elsewhere, and with a file more: nobody changes sides.
  WRITERS[kind](tmp_path / "there" / "deeper", TEXTS)
  first = next(p for p in (tmp_path / "there" / "deeper").iterdir() if p.is_file())
  shutil.copy(first, first.with_stem("0-comes-first"))
  more_train, more_heldout = _sides(_open(tmp_path / "there" / "deeper"), 0.3)
  assert train.items() <= more_train.items() and heldout.items() <= more_heldout.items()
  # A larger share only adds to the held-out side.
  _, wider = _sides(documents, 0.6)
  assert heldout.items() < wider.items()


def test_split_shares_of_many_records(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 20_000)
  _, heldout = sources.split(_open(tmp_path), 0.05)
  # Binomial: 1000 expected with a standard deviation of 31; four of them.
  assert abs(len(heldout) - 1000) < 125


def test_split_needs_both_sides(tmp_path):
  (tmp_path / "one.txt").write_text("the only document")
  for holdout in (0.001, 0.999):
    with pytest.raises(DataError, match=f"data.holdout: {holdout} of 1 documents leaves"):
      sources.split(_open(tmp_path), holdout)


def test_fingerprints_follow_content(tmp_path):
  _text(tmp_path / "a", TEXTS)
  shutil.copytree(tmp_path / "a", tmp_path / "b")
  a, b = _open(tmp_path / "a"), _open(tmp_path / "b")
  assert a.fingerprint == b.fingerprint
  train, heldout = sources.split(a, 0.3)
  assert sources.split(b, 0.3)[0].fingerprint == train.fingerprint != heldout.fingerprint
  assert sources.split(b, 0.5)[0].fingerprint != train.fingerprint
  (tmp_path / "b" / "a000.md").write_text("another length")
  assert _open(tmp_path / "b").fingerprint != a.fingerprint


# --- What is refused -----------------------------------------------------------------------------


def _files(**content):
  """A writer of files; underscores before the suffix become dots."""

  def write(folder):
    for name, data in content.items():
      stem, _, suffix = name.rpartition("_")
      (folder / f"{stem}.{suffix}").write_bytes(data)

  return write


def _numbers(folder):
  pq.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")


def _null(folder):
  pq.write_table(pa.table({"text": pa.array([None, "x"], pa.string())}), folder / "a.parquet")


def _latin_record(folder):
  writer = ArrayRecordWriter(str(folder / "a.arrayrecord"), "group_size:1")
  writer.write("naïve".encode("latin-1"))
  writer.close()


@pytest.mark.parametrize(
  ("write", "fields", "message"),
  [
    (_files(), {}, "data.source: .* holds no text file with any content"),
    (_files(a_txt=b""), {}, "data.source: .* holds no text file with any content"),
    (_files(a_txt=b"x"), {"format": "jsonl"}, r"holds no jsonl file \(.jsonl, .ndjson\) with"),
    (_files(a_jsonl=b"\n\n"), {}, "data.source: .* holds no document"),
    (_files(a_txt=b"x", b_jsonl=b"{}"), {}, "holds files of formats jsonl, text; set data.format"),
    (_files(a_txt="naïve".encode("latin-1")), {}, r"a.txt: is not UTF-8 text \(byte 2\)"),
    (_files(a_jsonl=b'\n\n{"text": 3'), {}, "a.jsonl:3: is not JSON"),
    (
      _files(a_jsonl=b"[1]\n"),
      {},
      r"a.jsonl:1: no field 'text' \(data.text_field\); the record is",
    ),
    (_files(a_jsonl=b'{"a": 1, "b": 2}'), {}, "a.jsonl:1: no field 'text' .* has a, b"),
    (_files(a_jsonl=b'{"text": [7]}'), {}, r"a.jsonl:1: field 'text' .* is \[7\], not a text"),
    (_files(a_parquet=b"no parquet"), {}, "a.parquet: cannot be read"),
    (_numbers, {}, r"a.parquet: column 'text' \(data.text_field\) is int64, not text"),
    (_numbers, {"text_field": "body"}, "a.parquet: no column 'body' .* has text"),
    (_null, {}, "a.parquet: row 0: column 'text' .* is null"),
    (_latin_record, {}, "a.arrayrecord: record 0: is not UTF-8 text"),
    (_files(a_arrayrecord=b"nothing"), {}, "a.arrayrecord: cannot be read"),
  ],
)
def test_refused_sources(write, fields, message, tmp_path):
  write(tmp_path)
  with pytest.raises(DataError, match=message) as caught:
    _open(tmp_path, **fields)[0]
  assert "\n" not in str(caught.value)


def test_refused_paths(tmp_path):
  with pytest.raises(DataError, match=r"data.source: .*nowhere' does not exist"):
    _open(tmp_path / "nowhere")
  (tmp_path / "a.jsonl.gz").write_bytes(b"")
  with pytest.raises(DataError, match=r"a.jsonl.gz: is compressed as a whole"):
    _open(tmp_path / "a.jsonl.gz")


def test_malformed_line_far_down(tmp_path):
  """Only reading it can show it; the message still counts the lines before it."""
  (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n{"text": \n{"text": "z"}\n')
  documents = _open(tmp_path)
  assert [documents[i] for i in (0, 1, 3)] == ["x", "y", "z"]
  with pytest.raises(DataError, match=r"a.jsonl:4: is not JSON"):
    documents[2]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_file_that_vanishes(kind, tmp_path):
  WRITERS[kind](tmp_path, TEXTS)
  documents = _open(tmp_path)
  last = len(TEXTS) - 1
  for path in tmp_path.rglob("*"):
    if path.is_file():
      path.unlink()
  with pytest.raises(DataError, match=r"cannot be read: .*[Nn]o such file") as caught:
    documents[last]
  assert "\n" not in str(caught.value)


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
  _parquet(tmp_path / "p", TEXTS)
  _array_record(tmp_path / "a", TEXTS)
  for module, folder in (("pyarrow", "p"), ("grain.sources", "a")):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"pip install hysparse\[train\]"):
      _open(tmp_path / folder)
