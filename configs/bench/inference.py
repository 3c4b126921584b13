"""What the inference benchmarks time: 8 layers of 256 channels, 31 M parameters, beside a peer.

    bash scripts/bench_peers/setup.sh    # once: the peer's environment
    python scripts/bench.py inference

The peer is the `deepseek_v4` model of scripts/bench_peers/deepseek_v4.py (31.7 M parameters):
equal in every size that both have, as near as the designs allow in the rest.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()

  config.model = ConfigDict()
  # The peer's schedule is `sliding*2 (heavy sparse)*3`. Its heavy layers attend to all entries of
  # 128 tokens each; its sparse ones have an indexer each and choose from entries of 4 tokens. Here
  # one source of entries of 2 tokens, as in the released encoder: twice as many to choose from. It
  # and the two reindex layers answer to the sparse layers, the reuse layers to the heavy ones.
  config.model.schedule = "swa*2 full/2 reuse (reindex reuse)*2"
  config.model.vocab_size = 4096
  config.model.d_model = 256  # hidden_size
  config.model.n_heads = 8
  config.model.head_dim = 64
  config.model.rope_dim = 32  # partial_rotary_factor 0.5
  config.model.q_rank = 128  # q_lora_rank
  config.model.o_groups = 2
  config.model.o_rank = 128  # o_lora_rank
  config.model.window = 128  # sliding_window
  config.model.top_k = 64  # index_topk
  config.model.index_heads = 4
  config.model.index_dim = 32
  config.model.n_experts = 16
  config.model.experts_per_token = 2  # of prompt tokens too, as in the peer
  config.model.shared_experts = 1
  config.model.expert_dim = 256  # moe_intermediate_size
  config.model.streams = 4  # hc_mult
  config.model.max_positions = 131_072
  # Float32 throughout, the cache too (train.numerics is "exact"), as in the peer.

  config.train = ConfigDict()
  config.train.compute_dtype = "float32"

  config.lock()
  return config
