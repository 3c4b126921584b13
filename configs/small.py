"""All mechanisms at a size for one GPU: 142 M parameters, documents of 4096 tokens.

python scripts/train.py --config=configs/small.py --workdir=runs/small
python scripts/footprint.py --config=configs/small.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()

  config.model = ConfigDict()
  # Two sources with an entry per 2 tokens; the decoder reads one entry a token, chosen twice.
  config.model.schedule = "swa*2 (full/2 reuse*2)*2 | full/1+candidates reuse reindex reuse"
  config.model.engram_layers = (1, 5)
  config.model.vocab_size = 16_384
  config.model.d_model = 512
  config.model.n_heads = 8
  config.model.head_dim = 64
  config.model.rope_dim = 32
  config.model.q_rank = 256
  config.model.o_groups = 2
  config.model.o_rank = 256
  config.model.window = 128
  config.model.top_k = 128  # of 2048 and 4096 entries
  config.model.index_heads = 8
  config.model.index_dim = 64
  config.model.candidate_blocks = 128  # a quarter of the decoder's entries
  config.model.candidate_block_size = 8
  config.model.n_experts = 16
  config.model.experts_per_token = 2
  config.model.expert_dim = 320
  config.model.streams = 4
  config.model.engram_heads = 4
  config.model.engram_dim = 32
  config.model.engram_vocab = 16_384  # rows of each of the 3 orders x 4 heads tables
  config.model.max_positions = 65_536

  config.data = ConfigDict()
  config.data.source = "stdlib"
  config.data.tokenizer = "bpe:16384"
  config.data.seq_len = 4096
  config.data.batch_size = 16

  config.optim = ConfigDict()
  config.optim.lr = 1e-3
  config.optim.warmup_steps = 500

  config.train = ConfigDict()
  config.train.steps = 20_000
  config.train.compute_dtype = "bfloat16"
  config.train.checkpoint_every = 1000
  config.train.log_every = 20

  config.eval = ConfigDict()
  config.eval.every = 1000
  config.eval.batches = 16

  config.lock()
  return config
