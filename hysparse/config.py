"""Typed, validated views of a ConfigDict: the one documentation of every field.

`configs/<name>.py` returns a plain `ml_collections.ConfigDict` with the groups `model`, `data`,
`optim`, `train` and `eval`; `Config.from_dict` turns it into frozen dataclasses once, refuses what
cannot work in one line that names the field, and everything later reads the dataclasses.

Source of the model fields: arXiv 2609.19969 (released values in configs/v41_flash.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from hysparse import schedule as schedule_lib
from hysparse.config_fields import ConfigError, build, plain


def _need(group: Any, prefix: str, name: str, holds: bool, legal: str) -> None:
  if not holds:
    raise ConfigError(f"{prefix}.{name}: is {getattr(group, name)!r}; must be {legal}")


Format = Literal["fp4", "mxfp4", "fp8", "bf16", "f32"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The architecture. Widths are channels, counts are per layer unless said."""

  schedule: str  # the layers, see schedule.py
  vocab_size: int  # rows of the embedding and the head
  d_model: int  # D, width of a residual stream
  n_heads: int  # H, query heads
  head_dim: int  # C, width of a head and of the shared latent
  rope_dim: int  # R, the last channels of C that rotate
  q_rank: int  # low-rank query width
  o_groups: int  # head groups of the output projection
  o_rank: int  # output rank of each group
  window: int  # W, tokens each query sees directly, itself included
  top_k: int  # K, entries each query selects

  n_experts: int  # routed experts
  experts_per_token: int  # active routed experts of a generated token
  expert_dim: int  # inner width of each expert and of the shared one

  engram_layers: tuple[int, ...] = ()  # layers that add n-gram memory

  index_heads: int = 0  # indexer query heads
  index_dim: int = 0  # indexer key width
  candidate_blocks: int = 0  # blocks in the candidate pool
  candidate_block_size: int = 8  # entries in a block of the pool

  experts_per_prompt_token: int = 0  # active routed experts of a prompt token; 0: as generated
  shared_experts: int = 1  # always-on experts, 0 or 1
  swiglu_limit: float = 10.0  # clamp of gate (above) and up (both sides); 0: none
  route_scale: float = 1.5  # factor on the routing weights
  score_func: Literal["sqrtsoftplus", "sigmoid", "softmax"] = "sqrtsoftplus"  # router score
  norm_topk_prob: bool = True  # chosen scores are divided by their sum
  gate_temp: float = 1.0  # router logits are divided by this

  residual: Literal["single_pass", "two_pass", "plain"] = "single_pass"  # stream mixing
  streams: int = 4  # M, residual streams; 1 for plain
  sinkhorn_iters: int = 20  # normalisations of the stream mix
  hc_eps: float = 1e-6  # epsilon of the stream mix
  norm_eps: float = 1e-20  # epsilon of every RMSNorm

  rope_theta: float = 10_000.0  # base of layers without a global branch
  compress_rope_theta: float = 160_000.0  # base of layers with one
  yarn_factor: float = 0.0  # YaRN on layers with a global branch; 0: none
  yarn_original: int = 65_536  # positions that YaRN starts from
  yarn_beta_fast: float = 32.0  # rotations above which nothing is interpolated
  yarn_beta_slow: float = 1.0  # rotations below which everything is
  max_positions: int = 1_048_576  # longest sequence

  engram_max_ngram: int = 4  # N, orders 2..N
  engram_heads: int = 0  # hash heads of each order
  engram_dim: int = 0  # channels of each table row
  engram_vocab: int = 0  # table sizes are successive primes from here
  engram_pad_id: int = 2  # token whose compressed id fills missing history
  engram_compressed_vocab: int = 0  # ids after normalising token texts; 0: vocab_size

  draft_layers: int = 0  # DSpark draft layers
  draft_experts: int = 0  # routed experts of a draft layer; 0: as the backbone
  draft_experts_per_token: int = 0  # active ones of them; 0: as the backbone
  draft_target_layers: tuple[int, ...] = ()  # layers whose incoming streams the drafts read
  draft_markov_rank: int = 0  # rank of the drafts' token-to-token logits
  draft_block: int = 5  # tokens of a draft block: the anchor and noise; as many are drafted
  draft_noise_id: int = 0  # token that stands where a draft is to be guessed

  image_token_id: int = 0  # token of every position of an image span
  vision_layers: int = 0  # ViT blocks; 0: no vision
  vision_dim: int = 0  # width of the ViT
  vision_heads: int = 0  # heads of the ViT
  vision_ffn_dim: int = 0  # inner width of its SwiGLU
  vision_patch: int = 14  # pixels along a side of a patch
  vision_theta: float = 10_000.0  # base of its two-dimensional RoPE
  vision_merge: int = 3  # patches along a side of the square that becomes one token
  vision_max_tokens: int = 1024  # most tokens that one image becomes
  vision_min_pixels: int = 0  # smaller images are enlarged to this area
  vision_max_wh_ratio: float = 0.0  # longest side over shortest; 0: any

  # The precision dial, one format per component of the cache (cache/layout.py).
  main_kv: Format = "fp4"
  index_k: Format = "mxfp4"
  window_kv: Format = "fp8"

  @functools.cached_property
  def layers(self) -> schedule_lib.Schedule:
    """The schedule as one `LayerSpec` per layer."""
    return schedule_lib.parse(self.schedule, self.engram_layers)

  @property
  def alignment(self) -> int:
    """Documents start at multiples of this many tokens, so that no group or block crosses one."""
    source = self.layers.candidate_source
    if source is None:
      return self.layers.ratio_lcm
    return math.lcm(self.layers.ratio_lcm, self.layers[source].ratio * self.candidate_block_size)

  @property
  def prompt_experts(self) -> int:
    """Active routed experts of a prompt token."""
    return self.experts_per_prompt_token or self.experts_per_token

  def __post_init__(self):
    try:
      layers = self.layers
    except schedule_lib.ScheduleError as error:
      # A message about one layer is about the string that names it.
      field = "schedule: " if str(error).startswith("layer ") else ""
      raise ConfigError(f"model.{field}{error}") from None
    need = functools.partial(_need, self, "model")
    for name in [
      "vocab_size",
      "d_model",
      "n_heads",
      "head_dim",
      "q_rank",
      "o_groups",
      "o_rank",
      "window",
      "n_experts",
      "experts_per_token",
      "expert_dim",
      "streams",
      "sinkhorn_iters",
      "max_positions",
    ]:
      need(name, getattr(self, name) >= 1, "at least 1")
    need("rope_dim", 2 <= self.rope_dim <= self.head_dim and self.rope_dim % 2 == 0,
         f"even and in 2..head_dim ({self.head_dim})")  # fmt: skip
    need("o_groups", self.n_heads % self.o_groups == 0, f"a divisor of n_heads ({self.n_heads})")
    need("experts_per_token", self.experts_per_token <= self.n_experts,
         f"at most n_experts ({self.n_experts})")  # fmt: skip
    need("experts_per_prompt_token", 0 <= self.experts_per_prompt_token <= self.experts_per_token,
         f"in 0..experts_per_token ({self.experts_per_token})")  # fmt: skip
    need("shared_experts", self.shared_experts in (0, 1), "0 or 1")
    need("swiglu_limit", self.swiglu_limit >= 0, "0 (no clamp) or positive")
    for name in ("gate_temp", "hc_eps", "norm_eps", "yarn_original", "yarn_beta_fast",
                 "yarn_beta_slow"):  # fmt: skip
      need(name, getattr(self, name) > 0, "positive")
    for name in ("rope_theta", "compress_rope_theta"):
      need(name, getattr(self, name) > 1, "above 1")
    need("streams", self.residual != "plain" or self.streams == 1,
         "1 when residual is 'plain'")  # fmt: skip
    if any(s.is_sparse for s in layers) or any(s.mode == "dense" for s in layers):
      need("top_k", self.top_k >= 1, "at least 1")
    if layers.index_sources:
      need("index_heads", self.index_heads >= 1, "at least 1: some layer has an indexer")
      need("index_dim", self.index_dim >= self.rope_dim,
           f"at least rope_dim ({self.rope_dim}): some layer has an indexer")  # fmt: skip
    if layers.candidate_source is not None:
      need("candidate_blocks", self.candidate_blocks >= 1, "at least 1: a layer has +candidates")
      need("candidate_block_size", self.candidate_block_size >= 1, "at least 1")
    for i, spec in enumerate(layers):
      if spec.mode == "gqa" and self.n_heads % spec.kv_heads:
        raise ConfigError(
          f"model.schedule: layer {i}: gqa/{spec.kv_heads} does not divide n_heads ({self.n_heads})"
        )
    if self.engram_layers:
      for name in ("engram_heads", "engram_dim", "engram_vocab"):
        need(name, getattr(self, name) >= 1, "at least 1: engram_layers is not empty")
      need("engram_max_ngram", self.engram_max_ngram >= 2, "at least 2")
      need("engram_pad_id", 0 <= self.engram_pad_id < self.vocab_size,
           f"in 0..vocab_size-1 ({self.vocab_size - 1})")  # fmt: skip
      need("engram_compressed_vocab", 0 <= self.engram_compressed_vocab <= self.vocab_size,
           f"in 0..vocab_size ({self.vocab_size})")  # fmt: skip
    need("draft_layers", self.draft_layers >= 0, "0 or more")
    if self.draft_layers:
      need("draft_experts", self.draft_experts >= 0, "0 (as the backbone) or more")
      experts = self.draft_experts or self.n_experts
      need("draft_experts_per_token", 0 <= self.draft_experts_per_token <= experts,
           f"0 (as the backbone) or up to {experts}")  # fmt: skip
      need("draft_markov_rank", self.draft_markov_rank >= 1, "at least 1: there are draft layers")
      legal = f"layers in 0..{len(layers) - 1}, at least one: there are draft layers"
      inside = all(0 <= layer < len(layers) for layer in self.draft_target_layers)
      need("draft_target_layers", self.draft_target_layers and inside, legal)
      need("draft_block", self.draft_block >= 1, "at least 1: there are draft layers")
      need("draft_noise_id", 0 <= self.draft_noise_id < self.vocab_size,
           f"in 0..vocab_size-1 ({self.vocab_size - 1}): there are draft layers")  # fmt: skip
    need("vision_layers", self.vision_layers >= 0, "0 (no vision) or more")
    if self.vision_layers:
      for name in ("vision_dim", "vision_heads", "vision_ffn_dim", "vision_patch", "vision_merge",
                   "vision_max_tokens"):  # fmt: skip
        need(name, getattr(self, name) >= 1, "at least 1: there are vision layers")
      need("vision_heads", self.vision_dim % (4 * self.vision_heads) == 0,
           f"such that vision_dim ({self.vision_dim}) / vision_heads divides by 4")  # fmt: skip
      need("vision_theta", self.vision_theta > 1, "above 1")
      need("vision_min_pixels", self.vision_min_pixels >= 0, "0 or more")
      need("vision_max_wh_ratio", self.vision_max_wh_ratio == 0 or self.vision_max_wh_ratio >= 1,
           "0 (any) or at least 1")  # fmt: skip
      need("image_token_id", 0 <= self.image_token_id < self.vocab_size,
           f"in 0..vocab_size-1 ({self.vocab_size - 1}): there are vision layers")  # fmt: skip
    for name in ("main_kv", "index_k", "window_kv"):
      need(name, getattr(self, name) in get_args(Format), f"one of {', '.join(get_args(Format))}")
    need("yarn_factor", self.yarn_factor == 0 or self.yarn_factor >= 1, "0 (no YaRN) or at least 1")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """What is read and how it becomes batches."""

  source: str = "stdlib"  # "stdlib" (the running Python's library) or a file or folder of yours
  format: Literal["auto", "text", "jsonl", "parquet", "arrayrecord"] = "auto"  # auto: by suffix
  text_field: str = "text"  # field of a JSONL record or column of a Parquet file
  tokenizer: str = "bpe:1024"  # "bpe:N" (trained on the source), "bytes", or a tokenizer.json
  seq_len: int = 1024  # tokens in a row
  batch_size: int = 4  # rows in a step
  seed: int = 0  # order of the documents
  holdout: float = 0.05  # share of the documents kept for evaluation, by hash of their name
  workers: int = 0  # grain worker processes; 0 reads in the trainer's own

  def __post_init__(self):
    need = functools.partial(_need, self, "data")
    need("seq_len", self.seq_len >= 2, "at least 2")
    need("batch_size", self.batch_size >= 1, "at least 1")
    need("holdout", 0 < self.holdout < 1, "between 0 and 1")
    need("workers", self.workers >= 0, "0 or more")
    kind, _, size = self.tokenizer.partition(":")
    if kind == "bpe":
      need("tokenizer", size.isdecimal() and int(size) >= 260, "bpe:N with N at least 260")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW on every group (training/optimizer.py), one learning-rate curve."""

  lr: float = 3e-3  # peak learning rate
  warmup_steps: int = 100  # linear from 0
  constant_share: float = 0.6  # share of all steps after which the cosine begins
  decay_share: float = 1.0  # share of all steps at which the cosine ends
  final_lr: float = 0.1  # factor on lr from there on
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-20  # of Adam
  weight_decay: float = 0.1  # on matrices and norm weights only
  engram_lr: float = 5.0  # factor on lr for Engram tables
  clip_norm: float = 1.0  # global gradient norm; 0: no clipping

  def __post_init__(self):
    need = functools.partial(_need, self, "optim")
    need("lr", self.lr > 0, "positive")
    need("warmup_steps", self.warmup_steps >= 0, "0 or more")
    need("constant_share", 0 <= self.constant_share <= self.decay_share <= 1,
         "0 <= constant_share <= decay_share <= 1")  # fmt: skip
    for name in ("b1", "b2"):
      need(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
    for name in ("eps", "final_lr", "weight_decay", "engram_lr", "clip_norm"):
      need(name, getattr(self, name) >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The loop, its losses and how the step is compiled."""

  steps: int = 300
  seed: int = 0  # of the parameters and of everything drawn in a step
  log_every: int = 10  # steps
  checkpoint_every: int = 100  # steps; also at the end and on SIGTERM
  keep_checkpoints: int = 2
  balance_rate: float = 1e-3  # step of the router biases, by sign of load
  balance_loss: float = 1e-4  # weight of the sequence-wise balance loss
  indexer_loss: float = 1.0  # weight of the indexers' KL (our choice, see training/losses.py)
  compute_dtype: Literal["bfloat16", "float32"] = "float32"  # activations; parameters are float32
  # What is rounded at run time. "exact": nothing but the compute dtype. "kvquant": also cached and
  # index values, to the formats of the precision dial. "official": also all that the released code
  # rounds (FP8 inputs of quantised matrices); activations are bfloat16 whatever compute_dtype says.
  numerics: Literal["exact", "kvquant", "official"] = "exact"
  remat: Literal["none", "layer"] = "none"  # recompute each layer in the backward pass
  scan_layers: bool = True  # scan runs of equal layers instead of unrolling them
  loss_block: int = 512  # tokens whose logits exist at once
  backend: Literal["auto", "reference", "xla"] = "auto"  # of the operations in hysparse_kernels

  def __post_init__(self):
    need = functools.partial(_need, self, "train")
    for name in ("steps", "log_every", "checkpoint_every", "keep_checkpoints", "loss_block"):
      need(name, getattr(self, name) >= 1, "at least 1")
    for name in ("balance_rate", "balance_loss", "indexer_loss"):
      need(name, getattr(self, name) >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Held-out evaluation and the sample at the end."""

  every: int = 100  # steps; also at the end
  batches: int = 8  # held-out batches
  recall_batches: int = 1  # held-out batches on which the indexers are compared with dense scores
  sample_prompt: str = "def "  # what the text sample continues
  sample_tokens: int = 200  # its length; 0: no sample
  temperature: float = 0.7  # of the sample; 0: greedy

  def __post_init__(self):
    need = functools.partial(_need, self, "eval")
    need("every", self.every >= 1, "at least 1")
    need("batches", self.batches >= 1, "at least 1")
    for name in ("recall_batches", "sample_tokens", "temperature"):
      need(name, getattr(self, name) >= 0, "0 or more")


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment."""

  model: ModelConfig
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  eval: EvalConfig = EvalConfig()

  def __post_init__(self):
    if self.data.seq_len % self.model.alignment:
      raise ConfigError(
        f"data.seq_len: is {self.data.seq_len}; must be a multiple of {self.model.alignment}, the"
        " tokens at which documents may start (the schedule's ratios and candidate blocks)"
      )
    if self.data.seq_len > self.model.max_positions:
      raise ConfigError(
        f"data.seq_len: is {self.data.seq_len}; at most model.max_positions"
        f" ({self.model.max_positions})"
      )

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> Config:
    """Builds and checks a config from nested mappings (a ConfigDict is one).

    Raises:
      ConfigError: an unknown key (with the nearest known one), a missing or illegal value.
    """
    return build(cls, values)

  def to_dict(self) -> dict[str, Any]:
    """Nested plain dictionaries, JSON-ready; `from_dict` reads them back."""
    return plain(dataclasses.asdict(self))
