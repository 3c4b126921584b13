"""A million tokens in the released cache's geometry, and the memory of a long prefill."""

import dataclasses
import functools
import json
import subprocess
import sys

import formats_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch
from hysparse.nn.model import forward

LAST = 1_048_575  # position of the token that is decoded
# The released sources, windows and selections; fewer layers that only read them, narrow streams.
RELEASED = {
  "schedule": "swa (full/2 reuse)*3 | full/1+candidates reuse reindex reuse",
  "head_dim": 512,
  "rope_dim": 64,
  "window": 128,
  "top_k": 512,
  "index_heads": 6,
  "index_dim": 128,
  "candidate_blocks": 2048,
  "candidate_block_size": 8,
  "yarn_factor": 16.0,
  "max_positions": 1_048_576,
}
# Scores and outputs are float32 sums of a few hundred products in another order.
SCORE_TOLERANCE, OUTPUT_TOLERANCE = 1e-4, 1e-4
# Entries whose scores lie closer together than that may be chosen one for the other.
MOST_EXCHANGED = 4


def filled(cfg):
  """A cache with random rows at every place: codes of any value, scales around 1."""
  cache = allocate(cfg, 1, LAST + 1)
  rng = np.random.default_rng(0)
  scales = {"fp4": (40, 64), "mxfp4": (124, 128), "fp8": (118, 121)}

  def rows(stored):
    def part(path, x):
      low, high = scales[stored.format] if path[-1].key == "scales" else (0, 256)
      if stored.format == "fp8" and path[-1].key == "codes":
        high = 0x7F  # 0x7f and 0xff are NaN
      return jnp.asarray(rng.integers(low, high, x.shape, np.uint8))

    return jax.tree_util.tree_map_with_path(part, stored)

  layers = []
  for layer in cache.layers:
    pools = tuple(
      dataclasses.replace(own, main_kv=rows(own.main_kv), index_keys=rows(own.index_keys))
      for own in layer.pools
    )
    slots = np.arange(cfg.model.window)
    tags = LAST - 1 - (LAST - 1 - slots) % cfg.model.window
    window = layer.window
    window = dataclasses.replace(
      window, rows=rows(window.rows), tags_BxW=jnp.broadcast_to(tags, window.tags_BxW.shape)
    )
    layers.append(dataclasses.replace(layer, window=window, pools=pools))
  return dataclasses.replace(
    cache, layers=tuple(layers), length_B=jnp.full((1,), LAST, jnp.int32),
    history_BxL=cache.history_BxL,
  )  # fmt: skip


def index_keys(pool) -> np.ndarray:
  """All keys of a pool in float32, decoded by the independent codec of the format tests."""
  codes, scales = (np.asarray(pool.parts[name]) for name in ("codes", "scales"))
  nibbles = np.concatenate([codes & 15, codes >> 4], axis=-1)
  values = formats_oracle.VALUES["e2m1"].astype(np.float32)[nibbles].reshape(len(codes), -1, 32)
  return (values * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(len(codes), -1)


@pytest.mark.slow
def test_a_step_at_the_last_of_a_million_positions():
  cfg = small.config(**RELEASED, train={"numerics": "kvquant"}, engram_layers=())
  graphdef, state = small.model(cfg)
  cache = filled(cfg)
  held = sum(x.nbytes for layer in cache.layers for x in jax.tree.leaves(layer.pools))
  assert held == 890 * (LAST + 1)
  step = jax.jit(functools.partial(forward, graphdef, capture=True), donate_argnums=2)
  output = step(state, Batch.of(jnp.asarray([[7]], jnp.int32)), cache)
  output.cache.check()
  assert np.isfinite(np.asarray(output.logits_BxNxV)).all()
  published = late = 0
  for i, spec in enumerate(cfg.model.layers):
    trace = output.aux.trace[i]
    if not spec.has_indexer:
      continue
    keys = index_keys(trace["index_keys"].rows)[: (LAST + 1) // spec.ratio]
    (q, weights), ids = trace["index"], np.asarray(trace["ids"])[0, 0]
    scores = np.maximum(keys @ np.asarray(q)[0, 0].T, 0) @ np.asarray(weights)[0, 0]
    if spec.candidate_role == "pool":
      mask = np.asarray(trace["pool"].mask(len(keys)))[0, 0]
      assert 0 < mask.sum() < len(keys)
      scores[~mask] = -np.inf
    best = np.argsort(-scores, kind="stable")[: cfg.model.top_k]
    assert len(set(ids) - set(best)) <= MOST_EXCHANGED, i
    cut = scores[best[-1]]
    assert scores[ids].min() >= cut - SCORE_TOLERANCE * max(1, abs(cut)), i
    # (Where nearly all head weights are negative, most entries tie at 0 and the first ones win.)
    late += ids.max() > (LAST + 1) // spec.ratio * 0.9
    published += 1
  assert published == 5 and late >= 3, "late entries are not selected"


PREFILL = """
import json, resource, sys
sys.path.insert(0, {tests!r})
import jax, jax.numpy as jnp, small
from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch

cfg = small.config("swa full/4 reuse", window=16, engram_layers=(), train={{"numerics": "kvquant"}})
graphdef, state = small.model(cfg)
peaks = []
for length in {lengths!r}:
  cache = allocate(cfg, 1, length)
  batch = Batch.of(small.tokens(cfg, 1, length))
  small.compiled(graphdef, state, batch, cache).logits_BxNxV.block_until_ready()
  peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps(peaks))
"""
# Kilobytes for each token of a prefill of a model of 32 channels and 3 streams: its activations
# are 3 x 32 float32 (384 bytes) a layer at least, several at a time.
KILOBYTES_PER_TOKEN = 12


@pytest.mark.slow
def test_the_memory_of_a_prefill_grows_with_its_length():
  lengths = [1024, 16_384, 65_536]
  code = PREFILL.format(tests=str(small.__file__).rsplit("/", 1)[0], lengths=lengths)
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  peaks = json.loads(result.stdout)
  grown = [peak - peaks[0] for peak in peaks[1:]]
  print("KiB beyond 1,024 tokens:", dict(zip(lengths[1:], grown, strict=True)))
  assert grown[1] < KILOBYTES_PER_TOKEN * lengths[2]
  assert grown[1] < 5 * max(grown[0], 1024)  # four times the tokens
