"""N-gram baselines against a slow version, as probabilities, and within document borders."""

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse.evaluation import ngram

VOCAB = 7
# Float64 sums of a few hundred logarithms in another order.
RELATIVE = 1e-12

DOCUMENTS = st.lists(
  st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40).map(np.int32), min_size=1, max_size=8
)


def _slow(documents, context, target):
  """Witten-Bell from dictionaries, one probability at a time."""
  pairs = [pair for ids in documents for pair in itertools.pairwise(ids)]
  targets = collections.Counter(b for _, b in pairs)
  unigram = (targets[target] + len(targets) / VOCAB) / (len(pairs) + len(targets))
  successors = collections.Counter(b for a, b in pairs if a == context)
  if not successors:
    return unigram, unigram
  seen, kinds = sum(successors.values()), len(successors)
  return unigram, (successors[target] + kinds * unigram) / (seen + kinds)


def _all_pairs():
  grid = np.indices((VOCAB, VOCAB)).reshape(2, -1)
  return grid[0].astype(np.int32), grid[1].astype(np.int32)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(documents=DOCUMENTS, merge=st.sampled_from([1, 10, 1 << 22]))
def test_every_probability(documents, merge):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ngram, "_MERGE_TOKENS", merge)
    model = ngram.fit(iter(documents), VOCAB)
  contexts, targets = _all_pairs()
  wanted = np.array([_slow(documents, a, b) for a, b in zip(contexts, targets, strict=True)])
  np.testing.assert_allclose(2 ** model.unigram.log2(contexts, targets), wanted[:, 0], RELATIVE)
  found = 2 ** model.log2(contexts, targets)
  np.testing.assert_allclose(found, wanted[:, 1], RELATIVE)
  np.testing.assert_allclose(found.reshape(VOCAB, VOCAB).sum(axis=1), 1, RELATIVE)


def test_pairs_stay_inside_documents():
  model = ngram.fit([np.int32([3, 4]), np.int32([5, 6]), np.int32([0])], VOCAB)
  contexts, targets = model.pairs_P // VOCAB, model.pairs_P % VOCAB
  assert [*zip(contexts, targets, strict=True)] == [(3, 4), (5, 6)]


def test_vocabularies_whose_square_is_beyond_32_bits():
  vocab = 130_000
  ids = np.int32([vocab - 1, vocab - 2, vocab - 1, vocab - 2, 5])
  model = ngram.fit([ids], vocab)
  probability = 2 ** model.log2(ids[:1], ids[1:2])
  unigram = (2 + 3 / vocab) / (4 + 3)
  np.testing.assert_allclose(probability, (2 + unigram) / (2 + 1), RELATIVE)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 99))
def test_evaluation_counts_masked_targets_in_their_bytes(documents, seed):
  rng = np.random.default_rng(seed)
  model = ngram.fit(documents, VOCAB)
  byte_lengths = np.int32([0, 1, 2, 3, 1, 1, 1])
  batches = [
    {
      "tokens": rng.integers(VOCAB, size=(3, 8), dtype=np.int32),
      "targets": rng.integers(VOCAB, size=(3, 8), dtype=np.int32),
      "mask": rng.random((3, 8)) < 0.7,
    }
    for _ in range(2)
  ]
  counted = [
    (a, b)
    for batch in batches
    for a, b, m in zip(*(batch[k].flat for k in ("tokens", "targets", "mask")), strict=True)
    if m
  ]
  for tested, column in ((model.unigram, 0), (model, 1)):
    score = ngram.evaluate(tested, batches, byte_lengths)
    bits = -sum(math.log2(_slow(documents, a, b)[column]) for a, b in counted)
    assert score.bits == pytest.approx(bits, rel=RELATIVE)
    assert score.tokens == len(counted)
    assert score.bits_per_token == pytest.approx(bits / len(counted), rel=RELATIVE)
    total = sum(byte_lengths[b] for _, b in counted)
    assert score.bits_per_byte == pytest.approx(bits / total, rel=RELATIVE)


def test_bigram_learns_what_unigram_cannot():
  """A cycle: all tokens are equally likely, and each is certain after the last."""
  ids = np.tile(np.arange(VOCAB, dtype=np.int32), 200)
  model = ngram.fit([ids], VOCAB)
  batch = {
    "tokens": ids[None, :-1],
    "targets": ids[None, 1:],
    "mask": np.ones((1, len(ids) - 1), bool),
  }
  lengths = np.ones(VOCAB, np.int32)
  assert ngram.evaluate(model.unigram, [batch], lengths).bits_per_byte == pytest.approx(
    math.log2(VOCAB), rel=1e-4
  )
  assert ngram.evaluate(model, [batch], lengths).bits_per_byte < 0.01


def test_nothing_to_count():
  with pytest.raises(ValueError, match="no document has two tokens"):
    ngram.fit([np.int32([3])], VOCAB)
  model = ngram.fit([np.int32([3, 4])], VOCAB)
  empty = {k: np.zeros((1, 4), np.int32) for k in ("tokens", "targets")}
  with pytest.raises(ValueError, match="no target that stands for text"):
    ngram.evaluate(model, [empty | {"mask": np.zeros((1, 4), bool)}], np.ones(VOCAB, np.int32))
