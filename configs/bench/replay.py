"""What the replay benchmark times: configs/bench/inference.py cut into encoder and decoder.

    python scripts/bench.py replay

A prompt needs all of its tokens in the 4 encoder layers and in the decoder's source, and only the
last `window` of them in the rest of the decoder; `prefill="all_layers"` runs everything.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

_BASE = pathlib.Path(__file__).with_name("inference.py")


def get_config() -> ConfigDict:
  config = runpy.run_path(str(_BASE))["get_config"]()
  with config.unlocked():
    # The decoder's first layer is its only source, with an entry a token.
    config.model.schedule = "swa*2 full/2 reuse | full/1+candidates reuse reindex reuse"
    config.model.candidate_blocks = 128  # a quarter of the 4,096 entries that are timed
    config.model.candidate_block_size = 8
  return config
