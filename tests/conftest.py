"""Shared set-up: absl flags are parsed once, and helpers beside the tests can be imported."""

import ctypes
import gc
import os
import shutil
import sys
from pathlib import Path

# Compile time is most of the test time: half of it is LLVM optimising programs that run once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# And a program that has not changed since an earlier run need not be compiled again, nor in another
# worker or subprocess.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest
from absl import flags

for folder in (".", "analysis", "nn", "training", "kernels", "conversion", "oracle"):
  sys.path.insert(0, str(Path(__file__).parent / folder))


COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "xla"
MOST_PROGRAMS = 50_000  # of all the versions of the code that were ever tested here


def pytest_configure(config):
  is_worker = hasattr(config, "workerinput")
  if not is_worker and COMPILED.exists() and len(os.listdir(COMPILED)) > MOST_PROGRAMS:
    shutil.rmtree(COMPILED)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"])


# Compiled programs of other files are of no use: a worker that keeps those of a thousand tests
# holds 8 GB.
MEMORY = 2 * 2**30


def _resident_bytes():
  try:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except OSError:
    return MEMORY  # not known here: as if it were too much


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
  yield
  if _resident_bytes() >= MEMORY:
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what is freed
      trim(0)
