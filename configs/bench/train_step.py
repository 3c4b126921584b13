"""What `scripts/bench.py train_step` times: a full step of a model of 256 channels.

    python scripts/bench.py train_step

Every mechanism of configs/tiny.py at twice its width; the fraction of the machine's matrix rate
that the step reaches is in docs/train_step.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()

  config.model = ConfigDict()
  config.model.schedule = "swa full/2 reuse*2 | full/1+candidates reuse reindex reuse"
  config.model.engram_layers = (1,)
  config.model.vocab_size = 4096
  config.model.d_model = 256
  config.model.n_heads = 8
  config.model.head_dim = 64
  config.model.rope_dim = 32
  config.model.q_rank = 128
  config.model.o_groups = 2
  config.model.o_rank = 128
  config.model.window = 64
  config.model.top_k = 64
  config.model.index_heads = 4
  config.model.index_dim = 32
  config.model.candidate_blocks = 40
  config.model.candidate_block_size = 8
  config.model.n_experts = 16
  config.model.experts_per_token = 2
  config.model.expert_dim = 256
  config.model.streams = 4
  config.model.engram_heads = 2
  config.model.engram_dim = 64
  config.model.engram_vocab = 4096
  config.model.max_positions = 4096

  config.data = ConfigDict()
  config.data.seq_len = 1024
  config.data.batch_size = 4

  config.lock()
  return config
