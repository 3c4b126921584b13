"""Baselines over the same tokens: unigram and bigram models, both with Witten-Bell smoothing.

    bigram = fit(data.train_documents(), vocab_size)
    score = evaluate(bigram, data.heldout(8), tokenizer.byte_lengths)
    score.bits_per_byte

A model that has learned anything from context beyond one token is below the bigram.

Source: Witten and Bell, "The zero-frequency problem", IEEE Transactions on Information Theory 37
(1991), in the interpolated form of Chen and Goodman, "An empirical study of smoothing techniques
for language modeling" (1999): after a context seen n times with t different successors,

    P(w | context) = (count(context, w) + t P'(w)) / (n + t)

where P' is the model with less context: the unigram for the bigram, 1 / vocab for the unigram.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

_MERGE_TOKENS = 1 << 22  # pairs sorted at once while counting


class Model(Protocol):
  """Anything that predicts the next token from the last one."""

  def log2(
    self, contexts_N: Int[np.ndarray, "N"], targets_N: Int[np.ndarray, "N"]
  ) -> Float64[np.ndarray, "N"]:
    """Base-2 logarithm of the probability of each target behind its context."""


@dataclasses.dataclass(frozen=True)
class Unigram:
  """Ignores the context. probabilities [vocab] float64."""

  probabilities_V: Float64[np.ndarray, "V"]

  def log2(
    self, contexts_N: Int[np.ndarray, "N"], targets_N: Int[np.ndarray, "N"]
  ) -> Float64[np.ndarray, "N"]:
    return np.log2(self.probabilities_V[targets_N])


@dataclasses.dataclass(frozen=True)
class Bigram:
  """Sparse pair counts over a unigram model.

  Attributes:
    pairs_P: the pairs seen, context * vocab + target, ascending.
    counts_P: how often each was.
    context_counts_V, successors_V: pairs, and different pairs, that begin with each token.
  """

  unigram: Unigram
  pairs_P: Int64[np.ndarray, "P"]
  counts_P: Int64[np.ndarray, "P"]
  context_counts_V: Int64[np.ndarray, "V"]
  successors_V: Int64[np.ndarray, "V"]

  def log2(
    self, contexts_N: Int[np.ndarray, "N"], targets_N: Int[np.ndarray, "N"]
  ) -> Float64[np.ndarray, "N"]:
    wanted_N = contexts_N.astype(np.int64) * len(self.successors_V) + targets_N
    place_N = np.minimum(np.searchsorted(self.pairs_P, wanted_N), len(self.pairs_P) - 1)
    counts_N = np.where(self.pairs_P[place_N] == wanted_N, self.counts_P[place_N], 0)
    seen_N, successors_N = self.context_counts_V[contexts_N], self.successors_V[contexts_N]
    unigram_N = self.unigram.probabilities_V[targets_N]
    # A context that was never seen says nothing: the unigram alone.
    interpolated_N = (counts_N + successors_N * unigram_N) / np.maximum(seen_N + successors_N, 1)
    return np.log2(np.where(seen_N > 0, interpolated_N, unigram_N))


@dataclasses.dataclass(frozen=True)
class Score:
  """Over the masked-in targets of some batches.

  Attributes:
    bits: all of them together.
    tokens, text_bytes: how many targets, and how many UTF-8 bytes they stand for. End tokens cost
      bits and stand for no bytes.
  """

  bits: float
  tokens: int
  text_bytes: int

  @property
  def bits_per_token(self) -> float:
    return self.bits / self.tokens

  @property
  def bits_per_byte(self) -> float:
    return self.bits / self.text_bytes


def fit(documents: Iterable[Int[np.ndarray, "N"]], vocab_size: int) -> Bigram:
  """Counts pairs inside each document; its `unigram` is fitted on the same targets.

  Args:
    documents: token ids of whole documents, the end token last.

  Raises:
    ValueError: no document has two tokens.
  """
  pairs_P, counts_P = np.zeros(0, np.int64), np.zeros(0, np.int64)
  waiting: list[np.ndarray] = []
  waiting_tokens = 0

  def merge() -> None:
    nonlocal pairs_P, counts_P, waiting_tokens
    new_N, new_counts_N = np.unique(np.concatenate(waiting), return_counts=True)
    pairs_P, place = np.unique(np.concatenate([pairs_P, new_N]), return_inverse=True)
    counts_P = _sums(place, np.concatenate([counts_P, new_counts_N]), len(pairs_P))
    waiting.clear()
    waiting_tokens = 0

  for ids_N in documents:
    ids_N = ids_N.astype(np.int64)
    waiting.append(ids_N[:-1] * vocab_size + ids_N[1:])
    waiting_tokens += len(ids_N)
    if waiting_tokens >= _MERGE_TOKENS:
      merge()
  if waiting:
    merge()
  if not len(pairs_P):
    raise ValueError("n-gram baselines: no document has two tokens to count")
  contexts_P, targets_P = np.divmod(pairs_P, vocab_size)
  target_counts_V = _sums(targets_P, counts_P, vocab_size)
  kinds = np.count_nonzero(target_counts_V)
  return Bigram(
    unigram=Unigram((target_counts_V + kinds / vocab_size) / (target_counts_V.sum() + kinds)),
    pairs_P=pairs_P,
    counts_P=counts_P,
    context_counts_V=_sums(contexts_P, counts_P, vocab_size),
    successors_V=np.bincount(contexts_P, minlength=vocab_size),
  )


def evaluate(
  model: Model,
  batches: Iterable[Mapping[str, np.ndarray]],
  byte_lengths: Int32[np.ndarray, "V"],
) -> Score:
  """Scores the targets that the loss counts, each predicted from the token before it.

  Args:
    batches: with tokens, targets and mask [B, S]; the context is the token at the target's place,
      so no context crosses a document.
    byte_lengths: UTF-8 bytes of each id.

  Raises:
    ValueError: the masks leave nothing.
  """
  bits, tokens, text_bytes = 0.0, 0, 0
  for batch in batches:
    targets_N = batch["targets"][batch["mask"]]
    bits -= float(model.log2(batch["tokens"][batch["mask"]], targets_N).sum())
    tokens += len(targets_N)
    text_bytes += int(byte_lengths[targets_N].sum())
  if not text_bytes:
    raise ValueError("n-gram baselines: the batches hold no target that stands for text")
  return Score(bits, tokens, text_bytes)


def _sums(
  keys_N: Int64[np.ndarray, "N"], values_N: Int64[np.ndarray, "N"], length: int
) -> Int64[np.ndarray, "K"]:
  """Sum of the values of each key, exact in int64."""
  sums_K = np.zeros(length, np.int64)
  np.add.at(sums_K, keys_N, values_N)
  return sums_K
