"""Shared set-up: absl flags are parsed once, and helpers beside the tests can be imported."""

import os
import sys
from pathlib import Path

# Compile time is most of the test time: half of it is LLVM optimising programs that run once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from absl import flags

for folder in ("nn", "training", "kernels", "conversion", "oracle"):
  sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_configure(config):
  del config
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"])
