"""DeepSeek-V4.1-Flash at its released sizes: 552 B parameters and two Engram tables of 98 B each.

Too large to train here: it is counted, compiled for and described without any array being made.

    python scripts/footprint.py --config=configs/v41_flash.py

prints 890 bytes of global cache per token. Source: arXiv 2609.19969 and its config.json.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()

  config.model = ConfigDict()
  config.model.schedule = "swa*2 (full/2 reuse*5)*3 | full/1+candidates reuse*3 (reindex reuse*3)*4"
  config.model.engram_layers = (1, 14)
  config.model.vocab_size = 129_280
  config.model.d_model = 5120
  config.model.n_heads = 64
  config.model.head_dim = 512
  config.model.rope_dim = 64
  config.model.q_rank = 1280
  config.model.o_groups = 8
  config.model.o_rank = 1024
  config.model.window = 128
  config.model.top_k = 512
  config.model.index_heads = 32
  config.model.index_dim = 128
  config.model.candidate_blocks = 2048
  config.model.candidate_block_size = 8
  config.model.n_experts = 384
  config.model.experts_per_token = 6
  config.model.shared_experts = 1
  config.model.expert_dim = 2304
  config.model.swiglu_limit = 10.0
  config.model.route_scale = 1.5
  config.model.score_func = "sqrtsoftplus"
  config.model.norm_topk_prob = True
  config.model.streams = 4
  config.model.sinkhorn_iters = 20
  config.model.hc_eps = 1e-6
  config.model.norm_eps = 1e-20
  config.model.rope_theta = 10_000.0
  config.model.compress_rope_theta = 160_000.0
  config.model.yarn_factor = 16.0
  config.model.yarn_original = 65_536
  config.model.yarn_beta_fast = 32.0
  config.model.yarn_beta_slow = 1.0
  config.model.max_positions = 1_048_576
  config.model.engram_max_ngram = 4
  config.model.engram_heads = 8
  config.model.engram_dim = 256
  config.model.engram_vocab = 16_000_000
  config.model.engram_pad_id = 2
  config.model.engram_compressed_vocab = 99_092
  config.model.draft_layers = 3
  config.model.draft_experts = 128
  config.model.draft_experts_per_token = 3
  config.model.draft_target_layers = (37, 38, 39)
  config.model.draft_markov_rank = 256
  config.model.draft_block = 5
  config.model.draft_noise_id = 128_799
  config.model.image_token_id = 129_264
  config.model.vision_layers = 32
  config.model.vision_dim = 1024
  config.model.vision_heads = 16
  config.model.vision_ffn_dim = 2816
  config.model.vision_patch = 14
  config.model.vision_theta = 10_000.0
  config.model.vision_merge = 3
  config.model.vision_max_tokens = 1024
  config.model.vision_min_pixels = 295_936
  config.model.vision_max_wh_ratio = 0.0
  config.model.main_kv = "fp4"
  config.model.index_k = "mxfp4"
  config.model.window_kv = "fp8"

  config.data = ConfigDict()
  config.data.tokenizer = "tokenizer.json"  # the released one
  config.data.seq_len = 4096

  config.train = ConfigDict()
  config.train.compute_dtype = "bfloat16"
  config.train.remat = "layer"

  config.lock()
  return config
