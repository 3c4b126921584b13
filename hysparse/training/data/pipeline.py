"""From documents to batches: shuffled, tokenised, packed, with a position that can be saved.

    data = load_data(config.data, alignment=config.model.alignment)
    batch = next(data.train)                  # fields of [B, S], see `Batch`
    state = data.train.get_state()            # JSON-ready; set_state goes on with the next batch
    for batch in data.heldout(8): ...         # the same ones every time

Source, tokenizer, packing and order are each their own file's; what is here joins them with grain.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import weakref
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grain
import numpy as np
from absl import flags
from jaxtyping import Int32

from hysparse import tokenizer as tokenizer_lib
from hysparse.config import DataConfig
from hysparse.tokenizer import Tokenizer
from hysparse.training.data import packing, sources
from hysparse.training.data.documents import DataError, Selection

# What a BPE is trained on, at most. More changes little and takes longer; the standard library
# fits in.
TOKENIZER_CHARACTERS = 16_000_000

# Packed rows are shuffled over about this share of the source, so that the rows of one long file
# do not fill batch after batch; over no more tokens than the limit: resuming reads them again.
_MIXED_SHARE = 1 / 4
_MIXED_TOKENS = 2**20
_BYTES_PER_TOKEN = 2  # a guess between bytes and large vocabularies

_READ_AHEAD_DOCUMENTS = 16
_READ_AHEAD_BATCHES = 2
_HELDOUT_SEED = 0  # order of held-out documents, whatever data.seed is

Batch = dict[str, np.ndarray]
"""Fields of [B, S]: tokens, targets, positions int32; mask, valid, is_prompt bool.

targets: the next token, the end token behind a document's last one.
positions: within the document (or piece of one), running on through its padding.
mask: where the loss counts: real tokens, all of which have a target.
valid: real tokens. is_prompt: tokens that stand for a prompt, all False without `prompt_split`.
"""


class TrainIterator(Iterator[Batch]):
  """Endless batches; every epoch has another order.

  `set_state(get_state())` goes on with the very next batch, also in another process. The state is
  plain JSON, refused where it would mean other batches: other documents, tokenizer, shape, seed,
  workers or shard.
  """

  def __init__(self, dataset: grain.IterDataset, identity: dict[str, Any]):
    self._iterator = iter(dataset)
    self._identity = identity
    self._position = json.dumps(self._iterator.get_state())
    self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    self._ahead: collections.deque[futures.Future] = collections.deque()
    # Worker processes should end before the interpreter does, closed or not.
    self._close_iterator = weakref.finalize(self, self._iterator.close)

  def __next__(self) -> Batch:
    while len(self._ahead) <= _READ_AHEAD_BATCHES:
      self._ahead.append(self._thread.submit(self._advance))
    batch, self._position = self._ahead.popleft().result()
    return batch

  def get_state(self) -> dict[str, Any]:
    return {"data": dict(self._identity), "position": json.loads(self._position)}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues behind the last batch before `get_state`.

    Raises:
      DataError: the state belongs to other data; names what differs.
    """
    saved = state["data"]
    for name, value in self._identity.items():
      if saved.get(name) != value:
        raise DataError(
          f"data position: was saved with {name} {saved.get(name)}, now it is {value}; the batches"
          " would not go on where they stopped"
        )
    self._stop_reading_ahead()
    self._iterator.set_state(state["position"])
    self._position = json.dumps(state["position"])

  def close(self) -> None:
    """Ends the threads and processes that read ahead. No batch can be had afterwards."""
    self._stop_reading_ahead()
    self._thread.shutdown()
    self._close_iterator()

  def _advance(self) -> tuple[Batch, str]:
    """One step of the reading thread: a batch and the position behind it."""
    batch = next(self._iterator)
    return batch, json.dumps(self._iterator.get_state())

  def _stop_reading_ahead(self) -> None:
    for step in self._ahead:
      step.cancel()
    futures.wait(self._ahead)
    self._ahead.clear()


@dataclasses.dataclass(frozen=True)
class Data:
  """What the trainer needs.

  Attributes:
    tokenizer: its `vocab_size` must not exceed the model's; the caller checks that.
    train: endless training batches of this shard.
    describe: one line that says what the data is.
    config, alignment, train_split, heldout_split: what the batches are made from.
  """

  tokenizer: Tokenizer
  train: TrainIterator
  describe: str
  config: DataConfig
  alignment: int
  train_split: Selection
  heldout_split: Selection

  def heldout(self, count: int) -> list[Batch]:
    """See `heldout_batches`."""
    return heldout_batches(
      self.config, self.tokenizer, self.alignment, count, documents=self.heldout_split
    )

  def train_documents(self) -> Iterator[Int32[np.ndarray, "N"]]:
    """Tokens of each training document once, its end token last."""
    for index in range(len(self.train_split)):
      yield np.append(
        self.tokenizer.encode(self.train_split[index]), np.int32(self.tokenizer.eos_id)
      )


def load_data(
  config: DataConfig,
  alignment: int,
  cache_dir: str | None = None,
  prompt_split: bool = False,
  *,
  shard_index: int = 0,
  shard_count: int = 1,
) -> Data:
  """Opens the source, trains or loads the tokenizer and builds the iterators.

  Args:
    alignment: documents start at multiples of this many tokens (`ModelConfig.alignment`).
    cache_dir: of trained tokenizers, see `tokenizer.train_bpe`.
    prompt_split: whether each document gets a random prompt prefix.
    shard_index, shard_count: this host reads every shard_count-th training document and returns
      its share of the rows of each batch. All hosts hold out the same documents.

  Raises:
    DataError, TokenizerError: one line that names the file or the field.
  """
  documents = sources.open_documents(config)
  train, heldout = sources.split(documents, config.holdout)
  tokenizer = tokenizer_lib.build(config.tokenizer, _some_texts(train), cache_dir)
  iterator = make_train_iterator(
    config,
    tokenizer,
    alignment,
    prompt_split,
    documents=train,
    shard_index=shard_index,
    shard_count=shard_count,
  )
  describe = (
    f"{config.source}: {len(documents)} documents, {documents.file_bytes / 1e6:.1f} MB"
    f" ({len(heldout)} held out); tokenizer {config.tokenizer}, {tokenizer.vocab_size} ids"
  )
  return Data(tokenizer, iterator, describe, config, alignment, train, heldout)


def make_train_iterator(
  config: DataConfig,
  tokenizer: Tokenizer,
  alignment: int,
  prompt_split: bool = False,
  *,
  documents: Selection | None = None,
  shard_index: int = 0,
  shard_count: int = 1,
) -> TrainIterator:
  """Training batches of `config.batch_size / shard_count` rows; arguments as for `load_data`.

  Args:
    documents: the training split, if it is open already.

  Raises:
    DataError: see `load_data`.
  """
  if documents is None:
    documents, _ = sources.split(sources.open_documents(config), config.holdout)
  layout = _layout(config, tokenizer, alignment)
  if config.batch_size % shard_count:
    raise DataError(
      f"data.batch_size: is {config.batch_size}; must be a multiple of the {shard_count} hosts"
    )
  if len(documents) < shard_count:
    raise DataError(
      f"data.source: {len(documents)} training documents are too few for {shard_count} hosts"
    )
  shard = grain.MapDataset.source(documents)[shard_index::shard_count]
  if not any(len(tokenizer.encode(shard[i])) for i in range(len(shard))):
    raise DataError(f"data.source: no training document of {config.source!r} has any text")
  shuffled = shard.shuffle(config.seed).repeat()
  if prompt_split:
    encoded = shuffled.random_map(functools.partial(_encode, tokenizer), seed=config.seed)
  else:
    encoded = shuffled.map(functools.partial(_encode, tokenizer))
  if config.workers and not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # grain's processes read flags; a notebook never parses any
  # Only reading and tokenising are shared out, and in turn: any number of workers gives the same
  # batches.
  encoded = _in_order(encoded).mp_prefetch(
    grain.MultiprocessingOptions(
      num_workers=config.workers, per_worker_buffer_size=_READ_AHEAD_DOCUMENTS
    )
  )
  rows = packing.pack(encoded, layout, config.seed)
  tokens = documents.file_bytes / _BYTES_PER_TOKEN / shard_count
  mixed_tokens = min(_MIXED_TOKENS, tokens * _MIXED_SHARE)
  rows = grain.experimental.WindowShuffleIterDataset(
    rows, window_size=max(1, int(mixed_tokens / config.seq_len)), seed=config.seed
  )
  batches = rows.batch(config.batch_size // shard_count, drop_remainder=True)
  identity = {
    "documents": documents.fingerprint,
    "tokenizer": tokenizer.fingerprint,
    "seq_len": config.seq_len,
    "alignment": alignment,
    "batch_size": config.batch_size,
    "seed": config.seed,
    "workers": config.workers,
    "prompt_split": prompt_split,
    "shard": [shard_index, shard_count],
  }
  return TrainIterator(batches, identity)


def heldout_batches(
  config: DataConfig,
  tokenizer: Tokenizer,
  alignment: int,
  count: int,
  *,
  documents: Selection | None = None,
) -> list[Batch]:
  """The first `count` batches of the held-out documents, in an order that nothing changes.

  With fewer documents there are fewer batches; rows that the last one lacks are padding.

  Args:
    documents: the held-out split, if it is open already.

  Raises:
    DataError: see `load_data`.
  """
  if documents is None:
    _, documents = sources.split(sources.open_documents(config), config.holdout)
  layout = _layout(config, tokenizer, alignment)
  shuffled = grain.MapDataset.source(documents).shuffle(_HELDOUT_SEED)
  encoded = _in_order(shuffled.map(functools.partial(_encode, tokenizer)))
  iterator = iter(packing.pack(encoded, layout, _HELDOUT_SEED))
  rows = list(itertools.islice(iterator, count * config.batch_size))
  iterator.close()
  if not rows:
    raise DataError(f"data.source: no held-out document of {config.source!r} has any text")
  rows += [packing.empty_row(layout)] * (-len(rows) % config.batch_size)
  return [
    _stack(rows[start : start + config.batch_size])
    for start in range(0, len(rows), config.batch_size)
  ]


def _encode(tokenizer: Tokenizer, text: str, rng: np.random.Generator | None = None) -> dict:
  """What `packing.cut` takes; the generator is the document's own in this epoch."""
  document = {"ids_N": tokenizer.encode(text)}
  return document if rng is None else document | {"prompt_seed": int(rng.integers(2**63))}


def _in_order(encoded: grain.MapDataset) -> grain.IterDataset:
  # Whole batches are read ahead by TrainIterator; a thread that hands over single documents would
  # cost more than it hides.
  return encoded.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _some_texts(documents: Selection) -> Iterator[str]:
  """Documents in a fixed random order, until they are enough to train a tokenizer."""
  shuffled = grain.MapDataset.source(documents).shuffle(0)
  characters = 0
  for index in range(len(shuffled)):
    if characters >= TOKENIZER_CHARACTERS:
      return
    yield (text := shuffled[index])
    characters += len(text)


def _layout(config: DataConfig, tokenizer: Tokenizer, alignment: int) -> packing.Layout:
  if config.seq_len % alignment:
    raise DataError(f"data.seq_len: is {config.seq_len}; must be a multiple of {alignment}")
  if not 0 <= config.seed < 2**32:
    raise DataError(f"data.seed: is {config.seed}; must be in 0..2**32-1")
  return packing.Layout(config.seq_len, alignment, tokenizer.eos_id, tokenizer.pad_id)


def _stack(rows: Sequence[packing.Row]) -> Batch:
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
