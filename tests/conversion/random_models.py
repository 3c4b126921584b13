"""Models for the exporter: small configs, random arrays, and where each tensor's values live."""

from __future__ import annotations

import re

import numpy as np

from hysparse.config import ModelConfig
from hysparse.conversion import tensors as tensors_lib

_BASE = {
  "schedule": "swa full/2 reuse | full/1+candidates reuse reindex reuse*2",
  "vocab_size": 40,
  "d_model": 64,
  "n_heads": 4,
  "head_dim": 24,
  "rope_dim": 8,
  "q_rank": 40,  # neither this nor o_groups * o_rank fills whole tiles
  "o_groups": 2,
  "o_rank": 20,
  "window": 4,
  "top_k": 3,
  "index_heads": 3,
  "index_dim": 8,
  "candidate_blocks": 3,
  "candidate_block_size": 2,
  "n_experts": 3,
  "experts_per_token": 2,
  "expert_dim": 32,
  "streams": 3,
  "max_positions": 4096,
}
ENGRAM = {"engram_heads": 2, "engram_dim": 32, "engram_vocab": 40, "engram_max_ngram": 3}
DRAFTS = {"draft_layers": 2, "draft_experts": 2, "draft_experts_per_token": 1,
          "draft_target_layers": (1, 2), "draft_markov_rank": 5}  # fmt: skip
VISION = {"vision_layers": 2, "vision_dim": 32, "vision_heads": 2, "vision_ffn_dim": 24,
          "vision_patch": 4, "vision_merge": 2, "image_token_id": 7}  # fmt: skip


def config(*groups: dict, **fields) -> ModelConfig:
  values = dict(_BASE)
  for group in groups:
    values |= group
  return ModelConfig(**(values | fields))


def everything() -> ModelConfig:
  return config(ENGRAM, DRAFTS, VISION, engram_layers=(1, 5))


def arrays(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """Random float32 arrays of many magnitudes, zero blocks and exact values among them."""
  rng = np.random.default_rng(seed)
  found: dict[str, np.ndarray] = {}
  for leaf in tensors_lib.leaves(model):
    value = rng.standard_normal(leaf.model_shape) * np.exp(rng.normal(size=leaf.model_shape))
    if leaf.is_quantised:
      value *= 2.0 ** rng.integers(-12, 12, (*leaf.model_shape[:-1], 1))
      value[..., : leaf.model_shape[-1] // 3] *= rng.integers(0, 2)
      value = np.where(rng.random(value.shape) < 0.1, np.sign(value) * 0.5, value)
    found[leaf.path] = value.astype(np.float32)
  if model.engram_layers:
    found["token_map"] = (np.arange(model.vocab_size) // 2).astype(np.int32)
  return found


# Released name (without layer and ending) -> path in the layer, and whether it is transposed.
_IN_LAYER = {
  r"(attn_norm|ffn_norm)\.weight": (r"\1/weight", False),
  r"hc_(attn|ffn)_(fn|base|scale)": (r"hc_\1/\2", False),
  r"attn\.attn_sink": (r"attn/sink", False),
  r"attn\.(wq_a|wq_b|wkv)\.weight": (r"attn/\1/weight", True),
  r"attn\.(q_norm|kv_norm)\.weight": (r"attn/\1/weight", False),
  r"attn\.(wo_a|wo_b)\.weight": (r"attn/output/\1/weight", True),
  r"attn\.compressor\.(wkv|wgate)\.weight": (r"attn/compressor/\1/weight", True),
  r"attn\.compressor\.norm\.weight": (r"attn/compressor/norm/weight", False),
  r"attn\.indexer\.(wq_b|weights_proj)\.weight": (r"attn/indexer/\1/weight", True),
  r"attn\.indexer\.wk\.weight": (r"attn/index_keys/wk/weight", True),
  r"attn\.indexer\.k_norm\.weight": (r"attn/index_keys/k_norm/weight", False),
  r"ffn\.gate\.(weight|bias)": (r"ffn/gate/\1", False),
  r"ffn\.gate\.bias_vl": (r"ffn/gate/bias_image", False),
  r"ffn\.experts\.(\d+)\.(w[123])\.weight": (r"ffn/experts/\2", True),
  r"ffn\.shared_experts\.(w[123])\.weight": (r"ffn/shared/\1/weight", True),
  r"engram\.embed\.weight": (r"engram/table", False),
  r"engram\.wkv\.weight": (r"engram/wkv/weight", True),
  r"engram\.(q_weight|k_weight)": (r"engram/\1", False),
}
_ALONE = {
  r"(embed|head|norm)\.weight": (r"\1/weight", False),
  r"mtp\.\d+\.main_proj\.weight": (r"drafts/main_proj/weight", True),
  r"mtp\.\d+\.(main_norm|norm)\.weight": (r"drafts/\1/weight", False),
  r"mtp\.\d+\.markov_head\.(embed|head)\.weight": (r"drafts/markov/\1", False),
  r"mtp\.\d+\.confidence_head\.proj\.weight": (r"drafts/confidence/weight", True),
  r"vision\.patch_embed\.proj\.weight": (r"vision/patch/weight", True),
  r"vision\.patch_embed\.proj\.bias": (r"vision/patch/bias", False),
  r"vision\.norm\.weight": (r"vision/norm/weight", False),
  r"aligner\.(w[12])\.weight": (r"aligner/\1/weight", True),
  r"aligner\.(w[12])\.bias": (r"aligner/\1/bias", False),
  r"image_(start|newline|end)": (r"image/\1", False),
}
_IN_BLOCK = {
  r"(norm[12])\.weight": (r"vision/blocks/\1/weight", False),
  r"attn\.(wqkv|wo)\.weight": (r"vision/blocks/attn/\1/weight", True),
  r"attn\.(wqkv|wo)\.bias": (r"vision/blocks/attn/\1/bias", False),
  r"mlp\.(w[12])\.weight": (r"vision/blocks/mlp/\1/weight", True),
}


def _path(table: dict, name: str) -> tuple[str, bool] | None:
  for pattern, (path, transposed) in table.items():
    match = re.fullmatch(pattern, name)
    if match:
      return match.expand(path), transposed
  return None


def values_of(name: str, model: ModelConfig, arrays: dict[str, np.ndarray]) -> np.ndarray:
  """What a released tensor (no scale) must hold, in its orientation, from arrays of the model."""
  index: tuple[int, ...] = ()
  found = _path(_ALONE, name)
  if not found:
    place, number, rest = re.fullmatch(r"(layers|mtp|vision\.blocks)\.(\d+)\.(.*)", name).groups()
    found = _path(_IN_BLOCK if place == "vision.blocks" else _IN_LAYER, rest)
    index = (int(number),)
    if place == "layers":
      runs = model.layers.runs()
      run = max(r for r, (first, _) in enumerate(runs) if first <= index[0])
      found = (f"runs/{run}/{found[0]}", found[1])
      index = (index[0] - runs[run][0],)
    elif place == "mtp":
      found = (f"drafts/layers/{found[0]}", found[1])
    expert = re.search(r"\.experts\.(\d+)\.", name)
    index += (int(expert[1]),) if expert else ()
  value = arrays[found[0]][index]
  if not found[1]:
    return value
  if value.ndim == 3:  # the groups of wo_a
    return np.concatenate([group.T for group in value])
  return value.T
