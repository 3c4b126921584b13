"""What a released config.json calls our fields, and what it can only mean.

Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
"""

ARCHITECTURE = "DeepseekV41ForCausalLM"

# Read always: published name -> ours.
CORE = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_attention_heads": "n_heads",
  "head_dim": "head_dim",
  "qk_rope_head_dim": "rope_dim",
  "q_lora_rank": "q_rank",
  "o_groups": "o_groups",
  "o_lora_rank": "o_rank",
  "sliding_window": "window",
  "n_routed_experts": "n_experts",
  "num_experts_per_tok": "experts_per_token",
  "moe_intermediate_size": "expert_dim",
  "swiglu_limit": "swiglu_limit",
  "scoring_func": "score_func",
  "norm_topk_prob": "norm_topk_prob",
  "routed_scaling_factor": "route_scale",
  "hc_mult": "streams",
  "hc_sinkhorn_iters": "sinkhorn_iters",
  "hc_eps": "hc_eps",
  "rms_norm_eps": "norm_eps",
  "rope_theta": "rope_theta",
  "max_position_embeddings": "max_positions",
}
# Read when some layer has a global branch.
SPARSE = {
  "compress_rope_theta": "compress_rope_theta",
  "index_n_heads": "index_heads",
  "index_head_dim": "index_dim",
  "index_topk": "top_k",
}
CANDIDATES = {
  "candidate_topk_blocks": "candidate_blocks",
  "candidate_block_size": "candidate_block_size",
}
ENGRAM = {
  "engram_max_ngram_size": "engram_max_ngram",
  "engram_n_heads": "engram_heads",
  "engram_head_dim": "engram_dim",
  "engram_vocab_size": "engram_vocab",
  "engram_compressed_vocab_size": "engram_compressed_vocab",
}
DRAFT = {
  "dspark_block_size": "draft_block",
  "dspark_noise_token_id": "draft_noise_id",
  "dspark_n_routed_experts": "draft_experts",
  "dspark_num_experts_per_tok": "draft_experts_per_token",
  "dspark_target_layer_ids": "draft_target_layers",
  "dspark_markov_rank": "draft_markov_rank",
}
YARN = {
  "factor": "yarn_factor",
  "original_max_position_embeddings": "yarn_original",
  "beta_fast": "yarn_beta_fast",
  "beta_slow": "yarn_beta_slow",
}
VISION = {
  "num_hidden_layers": "vision_layers",
  "hidden_size": "vision_dim",
  "num_attention_heads": "vision_heads",
  "intermediate_size": "vision_ffn_dim",
  "patch_size": "vision_patch",
  "rope_theta": "vision_theta",
  "downsample_ratio": "vision_merge",
  "max_image_tokens": "vision_max_tokens",
  "min_pixels": "vision_min_pixels",
}
# Published -> ours; groups other than text_config are named.
FIELDS = {
  **CORE,
  **SPARSE,
  **CANDIDATES,
  **ENGRAM,
  **DRAFT,
  **{f"rope_scaling.{name}": ours for name, ours in YARN.items()},
  **{f"vision_config.{name}": ours for name, ours in VISION.items()},
  "vision_config.max_wh_ratio": "vision_max_wh_ratio",
}

# One legal value each: there is nothing to configure, but another value is another model.
FIXED = {
  "num_key_value_heads": 1,
  "n_shared_experts": 1,
  "hidden_act": "silu",
  "attention_bias": False,
  "tie_word_embeddings": False,
  "topk_method": "noaux_tc",
}
# The one encoding of weights that is read and written.
ENCODING = {
  "quant_method": "fp8",
  "activation_scheme": "dynamic",
  "weight_block_size": [32, 32],
  "scale_fmt": "ue8m0",
  "expert_dtype": "fp4",
}
# Our fields that a config.json cannot say, with the one value that it means.
IMPLIED = {
  "residual": "single_pass",
  "shared_experts": 1,
  "main_kv": "fp4",
  "index_k": "mxfp4",
  "window_kv": "fp8",
}
