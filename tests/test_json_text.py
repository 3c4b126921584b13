"""JSON of others, and that every reader of it says in one line what is wrong."""

import pathlib
import shutil

import pytest

import hysparse
from hysparse import footprint, generation, json_text, published, tokenizer, workdir
from hysparse.config import ConfigError
from hysparse.conversion import parity_case
from hysparse.conversion.shards import INDEX, FolderError
from hysparse.training import metrics
from hysparse.training.data.documents import DataError, JsonLines

GOLDEN = pathlib.Path(__file__).parent / "golden" / "tiny-text"
DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["{", b"\xff", '{"a": 1, "a": 2}', DEEP, '{"a":' * 100_000])
def test_what_cannot_be_read_is_a_value_error(text):
  with pytest.raises(ValueError) as caught:
    json_text.parse(text)
  assert "\n" not in str(caught.value)


def test_a_key_may_stand_twice_where_that_is_asked_for():
  assert json_text.parse('{"a": 1, "a": 2}', repeats=True) == {"a": 2}


def released(path: pathlib.Path) -> None:
  """A folder whose config.json and index are there before one of them is damaged."""
  for name in ("config.json", INDEX):
    if not (path / name).exists():
      shutil.copy(GOLDEN / name, path / name)
  hysparse.load(path)


READERS = {
  "config.json": (released, FolderError),
  INDEX: (released, FolderError),
  "experiment.json": (hysparse.load, workdir.WorkdirError),
  "case.json": (parity_case.read, parity_case.CaseError),
  "tokenizer.json": (tokenizer.load, tokenizer.TokenizerError),
  "other.json": (lambda path: published.read(str(path / "other.json")), ConfigError),
  "family.json": (lambda path: footprint.read(path / "family.json"), ConfigError),
  "prompts.jsonl": (lambda path: generation.read_prompts(path / "prompts.jsonl"),
                    generation.PromptError),
  "text.jsonl": (lambda path: JsonLines(path, [path / "text.jsonl"], "text"), DataError),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_that_a_file_is_nested_too_deep(tmp_path, name):
  (tmp_path / name).write_text(DEEP)
  read, error = READERS[name]
  with pytest.raises(error) as caught:
    read(tmp_path)
  assert name in str(caught.value)
  assert not any(len(line) > 300 for line in str(caught.value).splitlines())


def test_metrics_end_where_a_line_cannot_be_read(tmp_path):
  (tmp_path / metrics.FILE).write_text('{"step": 1}\n' + DEEP + "\n")
  assert list(metrics.read(tmp_path)) == [{"step": 1}]
