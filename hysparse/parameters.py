"""Every weight of a model with its shape, from the config alone: how many there are, how many work.

`weights(config)` is the table; parameter counts, active parameters and the matrix part of the FLOP
count (flops.py) are sums over it. Shapes are written [inputs, outputs], also where a module keeps
the transpose.

Source: arXiv 2609.19969; every element of the released checkpoint is accounted for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from hysparse_kernels.engram import hash_constants

from hysparse import config as config_lib
from hysparse import schedule as schedule_lib


@dataclasses.dataclass(frozen=True)
class Weight:
  """One parameter of one layer.

  Attributes:
    part: the component it belongs to.
    name: as in the modules.
    shape: all of it; experts and tables stacked on the first axis.
    layer: None for what the model has once.
    used: elements that one token (or entry) touches; None: all.
    times: what it is multiplied with as a matrix, "token" or "entry"; None for lookups, norms and
      other elementwise use.
    detached: its input gets no gradient (the indexer trains on its own loss only).
  """

  part: str
  name: str
  shape: tuple[int, ...]
  layer: int | None = None
  used: int | None = None
  times: Literal["token", "entry"] | None = "token"
  detached: bool = False

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def active(self) -> int:
    return self.size if self.used is None else self.used


def parameters(config: config_lib.ModelConfig) -> dict[str, int]:
  """Parameters by component, draft head and vision as one each; `sum(values())` is all of them.

  "experts" are the routed and the shared ones. The routers' balance biases, which no gradient
  trains, are their own entry.
  """
  counts: dict[str, int] = {}
  for weight in weights(config):
    counts[weight.part] = counts.get(weight.part, 0) + weight.size
  if config.draft_layers:
    counts["drafts"] = sum(weight.size for weight in draft_weights(config))
  if config.vision_layers:
    counts["vision"] = sum(weight.size for weight in vision_weights(config))
  return counts


def backbone_parameters(config: config_lib.ModelConfig) -> int:
  """Parameters without Engram tables, draft head and vision: 552 B for the released model."""
  beside = ("engram_tables", "drafts", "vision")
  return sum(n for part, n in parameters(config).items() if part not in beside)


def active_parameters(config: config_lib.ModelConfig) -> dict[str, int]:
  """Parameters that one token touches, by what it is there for; of tables only the rows looked up.

  "decode": a generated token, all layers and the head. "prefill": a prompt token; where the
  decoder can be replayed from the end of the prompt, that is the encoder and what makes the
  decoder's entries. The head reads only the last token of a prompt, so it does not count.
  """
  layers = config.layers
  decoder = layers.decoder_start if layers.replay_unsupported_reason() is None else len(layers)

  def prefills(weight: Weight) -> bool:
    if weight.layer is None:
      return weight.part == "embedding"
    makes_entries = ("compressor", "engram", "engram_tables")
    at_source = weight.part in makes_entries or weight.name in ("attn_norm", "wk", "k_norm")
    return weight.layer < decoder or (weight.layer == decoder and at_source)

  return {
    "decode": sum(w.active for w in weights(config)),
    "prefill": sum(w.active for w in weights(config, config.prompt_experts) if prefills(w)),
  }


def weights(config: config_lib.ModelConfig, active_experts: int | None = None) -> Iterator[Weight]:
  """All weights of the backbone, layer by layer.

  Args:
    config: the model.
    active_experts: routed experts that a token uses; by default those of a generated token.
  """
  D, V = config.d_model, config.vocab_size
  active = config.experts_per_token if active_experts is None else active_experts
  yield Weight("embedding", "embed", (V, D), used=D, times=None)
  tables = dict(zip(config.engram_layers, engram_rows(config), strict=True))
  for i, spec in enumerate(config.layers):
    if spec.engram:
      yield from _placed(i, _engram(config, tables[i]))
    yield from _placed(i, _attention(config, spec))
    yield from _placed(i, _experts(config, config.n_experts, active))
    yield from _placed(i, _streams(config))
  yield Weight("norms", "final_norm", (D,), times=None)
  yield Weight("head", "head", (D, V))


def draft_weights(config: config_lib.ModelConfig) -> Iterator[Weight]:
  """All weights of the draft head; the embedding and the head are the backbone's.

  Source: arXiv 2609.19969, section 3 (DSpark).
  """
  D, V = config.d_model, config.vocab_size
  rank = config.draft_markov_rank
  experts = config.draft_experts or config.n_experts
  active = config.draft_experts_per_token or config.experts_per_token
  for i in range(len(config.layers), len(config.layers) + config.draft_layers):
    yield from _placed(i, _attention(config, schedule_lib.LayerSpec("swa")))
    yield from _placed(i, _experts(config, experts, active))
    yield from _placed(i, _streams(config))
  if config.draft_layers:
    yield Weight("drafts", "main_proj", (len(config.draft_target_layers) * D, D))
    yield Weight("drafts", "main_norm", (D,), times=None)
    yield Weight("drafts", "norm", (D,), times=None)
    yield Weight("drafts", "markov_embed", (V, rank), used=rank, times=None)
    yield Weight("drafts", "markov_head", (rank, V))
    yield Weight("drafts", "confidence", (D + rank, 1))


def vision_weights(config: config_lib.ModelConfig) -> Iterator[Weight]:
  """All weights of the image path: tower, aligner and the learned delimiters of a span.

  Nothing here is multiplied with text tokens. Source: arXiv 2609.19969, vision part of the release.
  """
  if not config.vision_layers:
    return
  c = config
  D, v, inner = c.d_model, c.vision_dim, c.vision_ffn_dim
  pixels, merged = 3 * c.vision_patch**2, v * c.vision_merge**2

  def weight(name: str, *shape: int, layer: int | None = None) -> Weight:
    return Weight("vision", name, shape, layer, used=0, times=None)

  yield from (weight("patch", pixels, v), weight("patch_bias", v))
  for i in range(c.vision_layers):
    for name, *shape in (
      ("norm1", v), ("wqkv", v, 3 * v), ("wqkv_bias", 3 * v), ("wo", v, v), ("wo_bias", v),
      ("norm2", v), ("mlp_w1", v, 2 * inner), ("mlp_w2", inner, v),
    ):  # fmt: skip
      yield weight(name, *shape, layer=i)
  yield weight("vision_norm", v)
  yield from (weight("aligner_w1", merged, D), weight("aligner_w1_bias", D))
  yield from (weight("aligner_w2", D, D), weight("aligner_w2_bias", D))
  yield from (weight(name, D) for name in ("start", "newline", "end"))


def engram_rows(config: config_lib.ModelConfig) -> tuple[int, ...]:
  """Rows of the Engram table of each layer in `engram_layers`.

  Raises:
    ConfigError: sizes that the hash cannot address.
  """
  c = config
  if not c.engram_layers:
    return ()
  try:
    tables = hash_constants(
      c.engram_layers,
      c.engram_max_ngram,
      c.engram_heads,
      c.engram_vocab,
      compressed_vocab=c.engram_compressed_vocab or c.vocab_size,  # no matter for the rows
    )
  except ValueError as error:
    raise config_lib.ConfigError(f"model.{error}") from None
  return tuple(table.rows for table in tables)


def _placed(layer: int, found: Iterator[Weight]) -> Iterator[Weight]:
  return (dataclasses.replace(weight, layer=layer) for weight in found)


def _attention(config: config_lib.ModelConfig, spec: schedule_lib.LayerSpec) -> Iterator[Weight]:
  c = config
  D, C, Q, heads = c.d_model, c.head_dim, c.q_rank, c.n_heads * c.head_dim
  yield Weight("norms", "attn_norm", (D,), times=None)
  yield Weight("attention", "wq_a", (D, Q))
  yield Weight("attention", "q_norm", (Q,), times=None)
  yield Weight("attention", "wq_b", (Q, heads))
  if spec.has_window:
    yield Weight("attention", "wkv", (D, C))
    yield Weight("attention", "kv_norm", (C,), times=None)
    yield Weight("attention", "sink", (c.n_heads,), times=None)
  else:
    kv_heads = spec.kv_heads or c.n_heads
    yield Weight("attention", "wk", (D, kv_heads * C))
    yield Weight("attention", "wv", (D, kv_heads * C))
  yield Weight("attention", "wo_a", (c.o_groups, heads // c.o_groups, c.o_rank))
  yield Weight("attention", "wo_b", (c.o_groups * c.o_rank, D))
  if spec.is_source:
    yield Weight("compressor", "wkv", (D, C))
    if spec.ratio > 1:
      yield Weight("compressor", "wgate", (D, C))
    yield Weight("compressor", "norm", (C,), times=None)
  if spec.owns_index_keys:
    yield Weight("indexer", "wk", (C, c.index_dim), times="entry", detached=True)
    yield Weight("indexer", "k_norm", (c.index_dim,), times=None)
  if spec.has_indexer:
    yield Weight("indexer", "wq_b", (Q, c.index_heads * c.index_dim), detached=True)
    yield Weight("indexer", "weights_proj", (D, c.index_heads), detached=True)


def _experts(config: config_lib.ModelConfig, experts: int, active: int) -> Iterator[Weight]:
  D, F = config.d_model, config.expert_dim
  yield Weight("norms", "ffn_norm", (D,), times=None)
  yield Weight("router", "gate", (D, experts))
  yield Weight("balance_bias", "bias", (experts,), times=None)
  if config.vision_layers:
    yield Weight("balance_bias", "bias_image", (experts,), used=0, times=None)
  for name, shape in (("w1", (D, F)), ("w3", (D, F)), ("w2", (F, D))):
    yield Weight("experts", name, (experts, *shape), used=active * D * F)
    if config.shared_experts:
      yield Weight("experts", f"shared_{name}", shape)


def _streams(config: config_lib.ModelConfig) -> Iterator[Weight]:
  if config.residual == "plain":
    return
  M = config.streams
  mixes = (2 + M) * M
  for sublayer in ("attn", "ffn"):
    yield Weight("streams", f"hc_{sublayer}_fn", (M * config.d_model, mixes))
    yield Weight("streams", f"hc_{sublayer}_base", (mixes,), times=None)
    yield Weight("streams", f"hc_{sublayer}_scale", (3,), times=None)


def _engram(config: config_lib.ModelConfig, rows: int) -> Iterator[Weight]:
  c = config
  looked_up = (c.engram_max_ngram - 1) * c.engram_heads * c.engram_dim
  yield Weight("engram_tables", "table", (rows, c.engram_dim), used=looked_up, times=None)
  yield Weight("engram", "wkv", (looked_up, (c.streams + 1) * c.d_model))
  yield Weight("engram", "q_weight", (c.streams, c.d_model), times=None)
  yield Weight("engram", "k_weight", (c.streams, c.d_model), times=None)
