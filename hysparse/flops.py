"""Analytic FLOPs of a model: one line per matrix product, from the config alone.

Counted are products of matrices, two FLOPs a multiply-add: projections, attention scores and
values, indexer scores, router, experts, Engram, the stream mixes and the head. Lookups, norms,
softmax, RoPE, activations, top-k and the optimizer are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from hysparse import config as config_lib
from hysparse import schedule as schedule_lib
from hysparse.parameters import weights

Visible = Literal["causal", "all"]


@dataclasses.dataclass(frozen=True)
class Dot:
  """`rows` rows, each with `size` multiply-adds.

  Attributes:
    part: component.
    name: the weight, or what is multiplied.
    layer: None for the head and the last fold of the streams.
    rows: tokens, entries or (query, key) pairs of one sequence.
    size: multiply-adds of a row: inputs times outputs.
    backward: products of the same size in the backward pass: 2 (gradients of both factors), 1 (of
      one only, the other is detached or constant) or 0 (a selection has no gradient).
  """

  part: str
  name: str
  layer: int | None
  rows: int
  size: int
  backward: int = 2

  @property
  def flops(self) -> int:
    return 2 * self.rows * self.size


def forward_flops(
  config: config_lib.ModelConfig, seq_len: int, visible: Visible = "causal", *, start: int = 0
) -> dict[str, int]:
  """FLOPs of a forward pass by component, without losses; `sum(values())` is the whole.

  `forward_flops(config, n, start=n - 1)` is one decoded token with n - 1 tokens before it.
  Arguments as in `forward_dots`.
  """
  return _by_part(forward_dots(config, seq_len, visible, start=start))


def train_step_flops(
  config: config_lib.ModelConfig, batch: int, seq_len: int, visible: Visible = "causal"
) -> int:
  """FLOPs of the forward and backward pass of a training step over `batch` sequences.

  Counted: every product of the forward pass and of the indexers' loss; twice that again in the
  backward pass where both factors get a gradient, once where one is detached (the inputs of the
  indexers). Selecting, by the indexers' scores or a dense layer's probabilities, is forward
  only. Recomputation (remat, blocked attention) is not counted, so this is the model's work and
  not the machine's.
  """
  dots = [*forward_dots(config, seq_len, visible), *loss_dots(config, seq_len, visible)]
  return batch * sum(dot.flops * (1 + dot.backward) for dot in dots)


def forward_dots(
  config: config_lib.ModelConfig, seq_len: int, visible: Visible = "causal", *, start: int = 0
) -> Iterator[Dot]:
  """Every product of a forward pass over the tokens start..seq_len-1 of one sequence.

  Args:
    config: the model; every token counts as a generated one (`experts_per_token`).
    seq_len: tokens of the sequence, earlier ones included.
    visible: "causal" counts the keys that a query may see: min(t + 1, W) window keys, (t + 1) // r
      entries of which min(K, visible) are selected. "all" counts what an unblocked implementation
      computes: W window rows, all T entries scored by every query, min(K, T) rows attended to.
    start: first token computed; the ones before it are in the cache.
  """
  c = config
  tokens = seq_len - start
  for weight in weights(config):
    if weight.times is None:
      continue
    rows = tokens
    if weight.times == "entry":
      ratio = c.layers[weight.layer].ratio
      rows = seq_len // ratio - start // ratio
    backward = 1 if weight.detached else 2
    yield Dot(weight.part, weight.name, weight.layer, rows, weight.active, backward)
  pairs = _Pairs(config, seq_len, start, visible)
  for i, spec in enumerate(c.layers):
    yield from _attention(c, i, spec, pairs)
    yield from _mixes(c, i, spec, tokens)
  if c.residual != "plain":
    yield Dot("streams", "last fold", None, tokens, c.streams * c.d_model)


def loss_dots(
  config: config_lib.ModelConfig, seq_len: int, visible: Visible = "causal"
) -> Iterator[Dot]:
  """Products of the indexers' loss: scores of the selected entries, once more with gradient."""
  pairs = _Pairs(config, seq_len, 0, visible)
  for i, spec in enumerate(config.layers):
    if spec.has_indexer:
      for name, size in _score_sizes(config):
        yield Dot("indexer_loss", name, i, pairs.selected(i), size)


def _attention(
  c: config_lib.ModelConfig, i: int, spec: schedule_lib.LayerSpec, pairs: _Pairs
) -> Iterator[Dot]:
  heads = c.n_heads * c.head_dim
  if spec.has_window:
    yield Dot("window_attention", "scores", i, pairs.window(), heads)
    yield Dot("window_attention", "values", i, pairs.window(), heads)
  if spec.is_sparse:
    yield Dot("selected_attention", "scores", i, pairs.selected(i), heads)
    yield Dot("selected_attention", "values", i, pairs.selected(i), heads)
  if spec.mode in ("dense", *schedule_lib.PLAIN):
    yield Dot("dense_attention", "scores", i, pairs.entries(spec.ratio or 1), heads)
    yield Dot("dense_attention", "values", i, pairs.entries(spec.ratio or 1), heads)
  if spec.mode == "dense" and any(s.index_source == i and s.is_sparse for s in c.layers):
    yield Dot("dense_attention", "oracle scores", i, pairs.entries(spec.ratio), heads, backward=0)
  if spec.has_indexer:
    for name, size in _score_sizes(c):
      yield Dot("indexer", name, i, pairs.scored(i), size, backward=0)


def _score_sizes(c: config_lib.ModelConfig) -> tuple[tuple[str, int], ...]:
  """Multiply-adds of one (query, entry) pair: the heads' products, then their weighted sum."""
  return ("scores", c.index_heads * c.index_dim), ("weighted sum", c.index_heads)


def _mixes(
  c: config_lib.ModelConfig, i: int, spec: schedule_lib.LayerSpec, tokens: int
) -> Iterator[Dot]:
  M, D = c.streams, c.d_model
  if spec.engram:
    yield Dot("engram", "gate", i, tokens, M * D)
  if c.residual != "plain":
    for sublayer in ("attn", "ffn"):
      # The model's first fold in single_pass is a constant, so only the streams get a gradient.
      constant = (c.residual, i, sublayer) == ("single_pass", 0, "attn")
      yield Dot("streams", f"{sublayer} fold", i, tokens, M * D, backward=1 if constant else 2)
      yield Dot("streams", f"{sublayer} mix", i, tokens, M * M * D)


@dataclasses.dataclass(frozen=True)
class _Pairs:
  """How many (query, key) pairs there are of each kind, over the queries start..seq_len-1."""

  config: config_lib.ModelConfig
  seq_len: int
  start: int
  visible: Visible

  def window(self) -> int:
    seen = np.minimum(self._queries() + 1, self.config.window)
    return self._sum(seen, everything=self.config.window)

  def entries(self, ratio: int) -> int:
    return self._sum((self._queries() + 1) // ratio, everything=self.seq_len // ratio)

  def scored(self, layer: int) -> int:
    """Entries that the indexer of a layer scores: in a candidate pool only those inside it."""
    return self._sum(self._in_reach(layer), everything=self.seq_len // self._ratio(layer))

  def selected(self, layer: int) -> int:
    """Entries that a sparse layer attends to."""
    K = self.config.top_k
    chooser = self.config.layers[layer].index_source
    seen = np.minimum(self._in_reach(chooser), K)
    return self._sum(seen, everything=min(K, self.seq_len // self._ratio(layer)))

  def _in_reach(self, layer: int) -> np.ndarray:
    """Entries that each query may select from at this index source."""
    seen = (self._queries() + 1) // self._ratio(layer)
    if self.config.layers[layer].candidate_role != "pool":
      return seen
    blocks, size = self.config.candidate_blocks, self.config.candidate_block_size
    # The newest block is always in the pool; it may be only partly visible.
    newest = seen - (seen - 1) // size * size
    return np.where(seen > blocks * size, (blocks - 1) * size + newest, seen)

  def _ratio(self, layer: int) -> int:
    return self.config.layers[layer].ratio

  def _queries(self) -> np.ndarray:
    return np.arange(self.start, self.seq_len, dtype=np.int64)

  def _sum(self, seen: np.ndarray, everything: int) -> int:
    if self.visible == "all":
      return (self.seq_len - self.start) * everything
    return int(seen.sum())


def _by_part(dots: Iterator[Dot]) -> dict[str, int]:
  totals: dict[str, int] = {}
  for dot in dots:
    totals[dot.part] = totals.get(dot.part, 0) + dot.flops
  return totals
