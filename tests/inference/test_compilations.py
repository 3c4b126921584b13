"""Whatever lengths come, few programs are compiled, and none twice."""

import numpy as np
import pytest
import small
from compiling import compilations

from hysparse.inference.engine import Engine
from hysparse.inference.requests import Request
from hysparse.inference.sampling import Sampling

PROGRAMS = 9  # as the docstring of Engine counts them: 4 widths + 2 + 3 lengths of the cache
SERVED = ("jit(prefill_chunk)", "jit(decode)")


def random_requests(seed: int, vocab: int) -> list[Request]:
  """200 prompts of 1..300 tokens, 1..12 new ones, with all kinds of settings."""
  rng = np.random.default_rng(seed)
  choices = (Sampling(), Sampling(1.0, 0.9, seed=1), Sampling(0.5, min_p=0.1, seed=2))
  return [
    Request(
      rng.integers(0, vocab, rng.integers(1, 301)).tolist(),
      int(rng.integers(1, 13)),
      choices[i % 3],
      stops=(int(rng.integers(vocab)),) * (i % 2),
    )
    for i in range(200)
  ]


@pytest.mark.slow
def test_200_prompts_of_random_lengths_compile_few_programs():
  cfg = small.config("swa", residual="plain", vocab_size=16)
  engine = Engine(*small.model(cfg), cfg, slots=4, max_tokens=512, chunk=128)
  with compilations() as first:
    assert len(list(engine.run(random_requests(0, 16)))) == 200
  assert sum(first[name] for name in SERVED) == len(engine.programs) == PROGRAMS, engine.programs
  with compilations() as second:
    assert len(list(engine.run(random_requests(1, 16)))) == 200
  assert not second, second
