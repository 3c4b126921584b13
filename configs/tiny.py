"""Every mechanism of the model at laptop size: trains on the standard library in a few minutes.

python scripts/train.py --config=configs/tiny.py --workdir=runs/tiny
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()

  config.model = ConfigDict()
  # A window layer, a source of two tokens an entry, the decoder's source with the candidate
  # pool, and a second selection inside that pool.
  config.model.schedule = "swa full/2 reuse*2 | full/1+candidates reuse reindex reuse"
  config.model.engram_layers = (1,)
  config.model.vocab_size = 1024
  config.model.d_model = 128
  config.model.n_heads = 4
  config.model.head_dim = 32
  config.model.rope_dim = 16
  config.model.q_rank = 64
  config.model.o_groups = 2
  config.model.o_rank = 64
  config.model.window = 32
  config.model.top_k = 32
  config.model.index_heads = 4
  config.model.index_dim = 32
  config.model.candidate_blocks = 24
  config.model.candidate_block_size = 8
  config.model.n_experts = 8
  config.model.experts_per_token = 2
  config.model.expert_dim = 128
  config.model.streams = 4
  config.model.engram_heads = 2
  config.model.engram_dim = 32
  config.model.engram_vocab = 4096
  config.model.max_positions = 8192

  config.data = ConfigDict()
  config.data.source = "stdlib"
  config.data.tokenizer = "bpe:1024"
  config.data.seq_len = 1024
  config.data.batch_size = 4

  config.optim = ConfigDict()
  config.optim.lr = 3e-3
  config.optim.warmup_steps = 40

  config.train = ConfigDict()
  config.train.steps = 160
  config.train.checkpoint_every = 50
  config.train.log_every = 5

  config.eval = ConfigDict()
  config.eval.every = 80
  config.eval.batches = 6

  config.lock()
  return config
