"""Random config.json files within what the published code can compute."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy_tables import hash_constants

# What `features` may pin; each is drawn otherwise.
FEATURES = (
  "modes",  # e.g. ["swa", "full", "reuse", "full", "reindex"]
  "ratios",  # of the sources among them, in order
  "candidates",  # the layer that publishes candidates, -1 for none
  "engram",  # the layers with Engram, in the order of their tables
  "drafts",  # draft layers, 0 for none
  "vision",  # whether there is a tower
  "yarn",  # whether there is rope_scaling
  "prompts",  # prompt lengths of run A and run B
)


def draw(rng: np.random.Generator, features: dict[str, Any]) -> dict:
  """A config.json; keys of `features` that FEATURES lacks are fields of its text_config.

  Args:
    rng: draws what features leave open.
    features: see FEATURES.
  """

  def pick(*choices):
    return choices[int(rng.integers(len(choices)))]

  def pinned(name, value):
    return features.get(name, value)

  vocab, layers = pick(64, 96, 130), int(rng.integers(1, 8))
  modes = pinned("modes", _modes(rng, layers))
  layers = len(modes)
  ratios = _ratios(modes, pinned("ratios", [pick(1, 1, 2, 2, 3, 4, 5) for _ in modes]))
  index_sources = [i for i, mode in enumerate(modes) if mode in ("full", "reindex")]
  kv_sources = [i for i, mode in enumerate(modes) if mode == "full"]
  last_kv = max(kv_sources, default=-1)
  legal = [-1, *(i for i in index_sources if i >= last_kv)]
  heads = pick(1, 2, 3, 4, 6)
  head_dim = pick(32, 64, 96)
  drafts = pinned("drafts", pick(0, 1, 2, 3))
  experts = int(rng.integers(1, 7))
  compressed = int(rng.integers(vocab // 3, vocab + 1))
  engram = pinned("engram", _subset(rng, layers, pick(0, 1, 2)))
  text = {
    "model_type": "deepseek_v41_text",
    "vocab_size": vocab,
    "hidden_size": pick(32, 64, 96),
    "moe_intermediate_size": pick(32, 64),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": 1,
    "head_dim": head_dim,
    "qk_rope_head_dim": pick(2, 8, 12, 16, 32),
    "q_lora_rank": pick(32, 64),
    "o_lora_rank": 32,
    "o_groups": pick(*(g for g in range(1, heads + 1) if heads % g == 0)),
    "hidden_act": "silu",
    "swiglu_limit": pick(0.0, 0.3, 1.0, 10.0),
    "rms_norm_eps": pick(1e-20, 1e-20, 1e-6),
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "rope_theta": pick(10000, 500.0),
    "rope_scaling": None,
    "n_routed_experts": experts,
    "n_shared_experts": 1,
    "num_experts_per_tok": int(rng.integers(1, min(experts, 4) + 1)),
    "scoring_func": pick("sqrtsoftplus", "sigmoid", "softmax"),
    "topk_method": "noaux_tc",
    "norm_topk_prob": pick(True, False),
    "routed_scaling_factor": pick(1.0, 1.5, 2.5),
    "sliding_window": int(rng.integers(1, 21)),
    "compress_ratios": ratios + [0] * (drafts * pick(0, 1)),
    "compress_rope_theta": pick(160000.0, 3000.0),
    "kv_source_layer_ids": kv_sources,
    "index_source_layer_ids": index_sources,
    "index_n_heads": pick(4, 7, 12, 16),
    "index_head_dim": pick(32, 64),
    "index_topk": int(rng.integers(1, 9)),
    "candidate_source_layer_id": pinned("candidates", pick(*legal)),
    "candidate_topk_blocks": int(rng.integers(1, 6)),
    "candidate_block_size": int(rng.integers(1, 6)),
    "hc_mult": pick(1, 2, 3, 4, 6),
    "hc_sinkhorn_iters": pick(1, 2, 7, 20),
    "hc_eps": pick(1e-6, 1e-4),
    "engram_layer_ids": engram,
    "engram_num_embeddings": [],
    "engram_max_ngram_size": int(rng.integers(2, 6)),
    "engram_vocab_size": pick(2, 17, 50, 100),
    "engram_n_heads": int(rng.integers(1, 5)),
    "engram_head_dim": pick(32, 64),
    "engram_pad_token_id": int(rng.integers(vocab)),
    "engram_compressed_vocab_size": compressed,
    "num_nextn_predict_layers": drafts,
    "dspark_block_size": int(rng.integers(1, 6)),
    "dspark_noise_token_id": int(rng.integers(vocab)),
    "dspark_target_layer_ids": _subset(rng, layers, int(rng.integers(1, 4))),
    "dspark_markov_rank": pick(1, 5, 32),
    "dspark_n_routed_experts": pick(0, experts, experts + 2),
    "dspark_num_experts_per_tok": pick(0, 1),
  }
  if pick(True, False):
    text["gate_temp"] = pick(0.7, 2.0)
  if pinned("yarn", pick(True, False)):
    text["rope_scaling"] = {
      "rope_type": "yarn",
      "factor": pick(1, 4, 16.0),
      "beta_fast": pick(32, 4),
      "beta_slow": pick(1, 2),
      "original_max_position_embeddings": pick(16, 32, 64),
    }
  text |= {key: value for key, value in features.items() if key not in FEATURES}
  text["engram_num_embeddings"] = _table_rows(text)
  config = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
      "quant_method": "fp8",
      "activation_scheme": "dynamic",
      "weight_block_size": [32, 32],
      "scale_fmt": "ue8m0",
      "expert_dtype": "fp4",
    },
    "text_config": text,
  }
  if pinned("vision", pick(True, False, False)):
    config["image_token_id"] = int(rng.integers(vocab))
    width, vision_heads = pick((32, 2), (48, 3), (64, 4), (32, 8))
    config["vision_config"] = {
      "model_type": "deepseek_v41_vision",
      "num_hidden_layers": pick(1, 2),
      "hidden_size": width,
      "num_attention_heads": vision_heads,
      "intermediate_size": pick(24, 40),
      "patch_size": pick(2, 3),
      "rope_theta": pick(10000.0, 100.0),
      "downsample_ratio": pick(1, 2, 3),
      "max_image_tokens": 64,
      "min_pixels": 64,
      "max_wh_ratio": None,
    }
  return config


def _modes(rng, layers: int) -> list[str]:
  modes = []
  for _ in range(layers):
    legal = ["swa", "full", "full"] + ["reindex", "reuse"] * (2 * ("full" in modes))
    modes.append(legal[int(rng.integers(len(legal)))])
  return modes


def _ratios(modes: list[str], drawn: list[int]) -> list[int]:
  """Of each layer: its own, that of the source before it, or 0."""
  ratio, left, found = 0, list(drawn), []
  for mode in modes:
    ratio = left.pop(0) if mode == "full" else ratio
    found.append(0 if mode == "swa" else ratio)
  return found


def _subset(rng, layers: int, count: int) -> list[int]:
  return [int(i) for i in rng.permutation(layers)[:count]]


def _table_rows(text: dict) -> list[int]:
  primes, _, _ = hash_constants(text)
  return [int(each.sum()) for each in primes]
