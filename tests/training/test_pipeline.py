"""Batches of a whole source: exact resuming, epochs, shards, workers, held-out batches."""

import collections
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from hysparse.config import DataConfig
from hysparse.evaluation import ngram
from hysparse.tokenizer import ByteTokenizer, TokenizerError
from hysparse.training.data import packing, pipeline
from hysparse.training.data.documents import DataError, Selection

ALIGNMENT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """90 documents of 0 to 400 bytes, each beginning with its number."""
  folder = tmp_path_factory.mktemp("documents")
  rng = np.random.default_rng(0)
  for i in range(90):
    text = "".join(rng.choice(list("abcdefgh \n"), size=rng.integers(400)))
    (folder / f"{i:02}.txt").write_text(f"{i:02}{text}")
  return folder


@pytest.fixture
def opened():
  """Makes iterators and closes them."""
  made = []

  def make(config, tokenizer=None, alignment=ALIGNMENT, **fields):
    iterator = pipeline.make_train_iterator(
      config, tokenizer or ByteTokenizer(), alignment, **fields
    )
    made.append(iterator)
    return iterator

  yield make
  for iterator in made:
    iterator.close()


def _config(folder, **fields):
  defaults = {"tokenizer": "bytes", "seq_len": 64, "batch_size": 2, "seed": 3, "holdout": 0.2}
  return DataConfig(**({"source": str(folder)} | defaults | fields))


def _equal(a, b):
  assert a.keys() == b.keys()
  return all(np.array_equal(a[k], b[k]) for k in a)


def _documents(batches):
  """Texts by the number each begins with, put together from its pieces."""
  texts = collections.defaultdict(str)
  for batch in batches:
    for row in range(len(batch["tokens"])):
      start = np.flatnonzero(batch["positions"][row] == 0)
      for piece in np.split(np.arange(batch["tokens"].shape[1]), start[1:]):
        ids = batch["tokens"][row][piece][batch["valid"][row][piece]]
        text = ByteTokenizer().decode(ids)
        if text[:2].isdecimal():
          texts[int(text[:2])] += text
  return texts


def test_fields_and_targets(folder, opened):
  config = _config(folder, batch_size=3)
  batch = next(opened(config))
  assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
    **dict.fromkeys(("tokens", "targets", "positions"), ((3, 64), np.int32)),
    **dict.fromkeys(("mask", "valid", "is_prompt"), ((3, 64), np.bool_)),
  }
  # Within a document the target is the token behind.
  inside = batch["mask"][:, :-1] & (batch["positions"][:, 1:] > 0) & batch["valid"][:, 1:]
  assert inside.sum() > 100
  assert (batch["targets"][:, :-1] == batch["tokens"][:, 1:])[inside].all()
  assert (batch["positions"][:, ::ALIGNMENT] % ALIGNMENT == 0).all()


WINDOW = packing.OPEN_ROWS // 2  # batches between two emptyings of the packer


@pytest.mark.parametrize("prompt_split", [False, True])
def test_resumes_with_the_very_next_batch(folder, opened, prompt_split):
  """Before anything, inside what is packed, at its end, and epochs later."""
  config = _config(folder)
  iterator = opened(config, prompt_split=prompt_split)
  batches, states = [], []
  for _ in range(3 * WINDOW):
    states.append(json.dumps(iterator.get_state()))
    batches.append(next(iterator))
  assert not _equal(batches[0], batches[1])
  assert any(batch["is_prompt"].any() for batch in batches) == prompt_split
  for at in (0, 1, 17, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 9):
    fresh = opened(config, prompt_split=prompt_split)
    if at % 2:
      next(fresh)  # also one that has read ahead elsewhere
    fresh.set_state(json.loads(states[at]))
    assert json.dumps(fresh.get_state()) == states[at]
    for k in range(at, min(at + 6, len(batches))):
      assert _equal(next(fresh), batches[k])
      if k + 1 < len(states):
        assert json.dumps(fresh.get_state()) == states[k + 1]


def test_resuming_reads_no_more_than_is_open(folder, opened, monkeypatch):
  config = _config(folder)
  iterator = opened(config)
  for _ in range(10 * WINDOW + 17):
    next(iterator)
  state = iterator.get_state()
  encoded = []
  encode = ByteTokenizer.encode
  monkeypatch.setattr(ByteTokenizer, "encode", lambda self, t: encoded.append(t) or encode(self, t))
  fresh = opened(config)
  fresh.set_state(state)
  next(fresh)
  # The documents of the open rows, the one that did not fit, one to check for text at all, and
  # what the reading thread is ahead.
  limit = packing.OPEN_ROWS * config.seq_len + 402 * (2 + pipeline._READ_AHEAD_DOCUMENTS)
  assert 0 < sum(map(len, encoded)) < limit


@pytest.mark.parametrize(
  ("field", "value"),
  [("seed", 4), ("batch_size", 4), ("seq_len", 128), ("holdout", 0.3), ("source", "")],
)
def test_states_of_other_data_are_refused(folder, opened, tmp_path, field, value):
  if field == "source":
    (tmp_path / "copy").mkdir()
    for path in folder.iterdir():
      (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "copy" / "00.txt").write_text("changed")
    value = str(tmp_path / "copy")
  state = opened(_config(folder)).get_state()
  named = {"holdout": "documents", "source": "documents"}.get(field, field)
  with pytest.raises(DataError, match=f"data position: was saved with {named} "):
    opened(_config(folder, **{field: value})).set_state(state)


def test_every_epoch_has_another_order(tmp_path, opened, monkeypatch):
  """Two documents fill a row and all of them the packer, so it empties once an epoch."""
  monkeypatch.setattr(pipeline, "_MIXED_SHARE", 0)  # which would mix a few rows across epochs
  count = 2 * packing.OPEN_ROWS
  lines = [json.dumps({"text": f"{i:04}"}) + "\n" for i in range(count)]
  (tmp_path / "d.jsonl").write_text("".join(lines))
  config = _config(tmp_path, seq_len=8, batch_size=1)
  documents = Selection(pipeline.sources.open_documents(config), np.arange(count))
  iterators = [opened(config, documents=documents) for _ in range(2)]
  iterators.append(opened(_config(tmp_path, seq_len=8, batch_size=1, seed=99), documents=documents))
  # Who stands beside whom shows the order of the documents, not that of the rows.
  first, second, again, other = (
    [ByteTokenizer().decode(next(iterator)["tokens"][0]) for _ in range(packing.OPEN_ROWS)]
    for iterator in (iterators[0], *iterators)
  )
  for rows in (first, second, other):
    texts = sorted(row[start : start + 4] for row in rows for start in (0, 4))
    assert texts == [documents[i] for i in range(count)]
  assert again == first
  assert len(set(first) & set(second)) < packing.OPEN_ROWS / 8
  assert len(set(first) & set(other)) < packing.OPEN_ROWS / 8


def test_rows_of_one_long_document_do_not_follow_each_other(tmp_path, opened):
  """Without mixing, the packer's open rows would all be of the long document at once."""
  rows_of_long, others = 2 * packing.OPEN_ROWS, 2 * packing.OPEN_ROWS
  (tmp_path / "long.txt").write_text("a" * 64 * rows_of_long)
  for i in range(others):
    (tmp_path / f"{i:04}.txt").write_text("b" * 64 * 16)
  config = _config(tmp_path, batch_size=16)
  every = np.arange(1 + others)
  documents = Selection(pipeline.sources.open_documents(config), every)
  iterator = opened(config, documents=documents)
  long_id = ByteTokenizer().encode("a")[0]
  shares = [(next(iterator)["tokens"] == long_id).mean() for _ in range(17 * rows_of_long // 16)]
  assert 0 < np.mean(shares) < 2 / 17, "the long document is a seventeenth of an epoch"
  assert max(shares) < 0.9, "a batch is of the long document alone"


def test_held_out_documents_are_never_trained_on(folder, opened):
  config = _config(folder)
  iterator = opened(config)
  trained = set(_documents(next(iterator) for _ in range(4 * WINDOW)))
  heldout = _documents(pipeline.heldout_batches(config, ByteTokenizer(), ALIGNMENT, 10**6))
  assert trained and heldout
  assert not trained & set(heldout)
  assert len(trained) + len(heldout) == 90


def test_held_out_batches_are_fixed(folder):
  config = _config(folder, batch_size=4)
  batches = pipeline.heldout_batches(config, ByteTokenizer(), ALIGNMENT, 10**6)
  assert 3 < len(batches) < 100
  for other, count in ((config, 2), (_config(folder, batch_size=4, seed=11), len(batches))):
    again = pipeline.heldout_batches(other, ByteTokenizer(), ALIGNMENT, count)
    assert len(again) == count
    assert all(_equal(a, b) for a, b in zip(batches, again, strict=False))
  # Rows that the documents do not fill are padding, and nothing of a document is missing.
  assert {b["tokens"].shape for b in batches} == {(4, 64)}
  rows = np.concatenate([b["valid"] for b in batches])
  assert not rows[-1].any() or len(rows) % 4 == 0
  config = _config(folder)
  _, documents = pipeline.sources.split(pipeline.sources.open_documents(config), config.holdout)
  assert rows.sum() == sum(len(documents[i].encode()) for i in range(len(documents)))


def test_shards_read_disjoint_documents(folder, opened):
  config = _config(folder, batch_size=4)
  seen, rows = [], []
  for shard in range(2):
    iterator = opened(config, shard_index=shard, shard_count=2)
    batches = [next(iterator) for _ in range(3 * WINDOW)]
    rows.append(batches[0]["tokens"].shape[0])
    seen.append(set(_documents(batches)))
  whole = opened(config)
  assert rows == [2, 2]
  assert not seen[0] & seen[1]
  assert seen[0] | seen[1] == set(_documents(next(whole) for _ in range(3 * WINDOW)))
  with pytest.raises(DataError, match="was saved with shard"):
    opened(config, shard_index=1, shard_count=2).set_state(whole.get_state())


def test_worker_processes_change_nothing(folder, opened):
  here, there = (opened(_config(folder, workers=n), prompt_split=True) for n in (0, 2))
  for _ in range(WINDOW + 5):
    assert _equal(next(here), next(there))
  state = json.loads(json.dumps(there.get_state()))
  wanted = [next(there) for _ in range(4)]
  there.set_state(state)
  assert all(_equal(next(there), batch) for batch in wanted)


def test_prompts_differ_between_epochs_and_not_between_runs(folder, opened):
  config = _config(folder)
  first, again = (opened(config, prompt_split=True) for _ in range(2))
  prompts = collections.defaultdict(set)
  for _ in range(6 * WINDOW):
    batch = next(first)
    assert _equal(batch, next(again))
    assert not (batch["is_prompt"] & ~batch["valid"]).any()
    for row in range(2):
      starts = np.flatnonzero((batch["positions"][row] == 0) & batch["valid"][row])
      for start in starts:
        key = tuple(batch["tokens"][row][start : start + 12])
        prompts[key].add(int(np.argmin(np.append(batch["is_prompt"][row][start:], False))))
  assert np.mean([len(lengths) > 1 for lengths in prompts.values()]) > 0.9


# --- All together --------------------------------------------------------------------------------


def test_load_data(folder, tmp_path):
  config = _config(folder, tokenizer="bpe:270", seq_len=32)
  data = pipeline.load_data(config, ALIGNMENT, cache_dir=tmp_path, prompt_split=True)
  assert data.tokenizer.vocab_size == 270
  assert "90 documents" in data.describe and "bpe:270" in data.describe
  batch = next(data.train)
  assert batch["tokens"].shape == (2, 32) and batch["tokens"].max() < 270
  assert batch["is_prompt"].any()
  heldout = data.heldout(3)
  assert len(heldout) == 3 and not heldout[0]["is_prompt"].any()
  documents = list(data.train_documents())
  assert len(documents) == len(data.train_split)
  for i, ids in enumerate(documents):
    assert ids[-1] == data.tokenizer.eos_id
    assert data.tokenizer.decode(ids[:-1]) == data.train_split[i]
  model = ngram.fit(documents, 270)
  score = ngram.evaluate(model, heldout, data.tokenizer.byte_lengths)
  # Letters are drawn evenly from ten: no model can know more than log2(10) a byte, and one that
  # counts right is not far above.
  assert np.log2(10) < score.bits_per_byte < np.log2(10) + 0.6
  data.train.close()


def test_the_tokenizer_sees_training_documents_only(folder, tmp_path, monkeypatch):
  given = []
  build = pipeline.tokenizer_lib.build

  def spy(kind, texts, cache_dir):
    given.extend(texts)
    return build(kind, given, cache_dir)

  monkeypatch.setattr(pipeline.tokenizer_lib, "build", spy)
  data = pipeline.load_data(_config(folder, tokenizer="bpe:270"), ALIGNMENT, tmp_path)
  data.train.close()
  train = [data.train_split[i] for i in range(len(data.train_split))]
  assert sorted(given) == sorted(train) and given != train
  monkeypatch.setattr(pipeline, "TOKENIZER_CHARACTERS", 2000)
  some = list(pipeline._some_texts(data.train_split))
  assert some == given[: len(some)] and 2000 <= sum(map(len, some)) < 2000 + 402


def test_a_run_ends_without_a_word(folder):
  """Threads that read ahead must not hold up or litter the end of the interpreter."""
  code = (
    "import sys; from hysparse.config import DataConfig;"
    "from hysparse.training.data import pipeline;"
    "data = pipeline.load_data(DataConfig(source=sys.argv[1], tokenizer='bytes', holdout=0.2), 4);"
    "next(data.train)"
  )
  out = subprocess.run(
    [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
  )
  assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


# --- What is refused -----------------------------------------------------------------------------


def test_refused_fields(folder, opened):
  for fields, arguments, message in (
    ({"seq_len": 66}, {}, "data.seq_len: is 66; must be a multiple of 4"),
    ({"seed": -1}, {}, "data.seed: is -1; must be in"),
    ({}, {"shard_count": 4}, "data.batch_size: is 2; must be a multiple of the 4 hosts"),
    ({"batch_size": 100}, {"shard_count": 100}, "training documents are too few for 100 hosts"),
  ):
    with pytest.raises(DataError, match=message):
      opened(_config(folder, **fields), **arguments)
  with pytest.raises(TokenizerError, match=r"data.tokenizer: is 'no.json'"):
    pipeline.load_data(_config(folder, tokenizer="no.json"), ALIGNMENT)


def test_documents_without_text(tmp_path, opened):
  """Endless epochs of nothing would never give a batch."""
  (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
  with pytest.raises(DataError, match=r"no training document of .* has any text"):
    opened(_config(tmp_path))
  with pytest.raises(DataError, match=r"no held-out document of .* has any text"):
    pipeline.heldout_batches(_config(tmp_path), ByteTokenizer(), ALIGNMENT, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_records_stop_the_iterator_by_name(tmp_path, opened, workers):
  lines = [json.dumps({"text": "fine"})] * 40 + ["broken"] * 10
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  iterator = opened(_config(tmp_path, workers=workers))
  with pytest.raises(DataError, match=r"a\.jsonl:\d+: is not JSON"):
    list(itertools.islice(iterator, 100))
