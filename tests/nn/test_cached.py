"""A call with a cache continues a sequence: chunked = whole = one by one, in every mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from hypothesis import given, settings
from test_model import FIXED, configs

from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch

# Float32 logits of the same function with products summed in another order.
LOGIT_TOLERANCE = 2e-5
LENGTH = 48
WIDTH = 9  # the one chunk length that is compiled beside single tokens
# How many tokens each of the two sequences gets in each call; 0 leaves a sequence as it is.
RAGGED = ((9, 4), (1, 1), (0, 7), (9, 9), (1, 0), (8, 3), (9, 9), (1, 1), (9, 5), (1, 9))


def fed(cfg, tokens, calls):
  """[B, S, V] logits by calls of `calls` tokens, NaN where no token was fed; and the cache."""
  graphdef, state = small.model(cfg)
  cache = allocate(cfg, 2, tokens.shape[1], block_tokens=cfg.model.alignment)  # many small blocks
  length = np.zeros(2, int)
  logits = np.full((*tokens.shape, cfg.model.vocab_size), np.nan, np.float32)
  for counts in calls:
    width = 1 if max(counts) == 1 else WIDTH
    at = np.minimum(length[:, None] + np.arange(width), tokens.shape[1] - 1)
    valid = np.arange(width) < np.asarray(counts)[:, None]
    chunk = np.take_along_axis(np.asarray(tokens), at, axis=1)
    batch = dataclasses.replace(Batch.of(jnp.asarray(chunk)), valid_BxS=jnp.asarray(valid))
    output = small.compiled(graphdef, state, batch, cache, all_positions=True)
    cache = output.cache
    for b in range(2):
      logits[b, length[b] : length[b] + counts[b]] = output.logits_BxNxV[b, : counts[b]]
    length = length + np.asarray(counts)
  cache.check()
  return logits, cache


def check_chunks(cfg, calls=RAGGED):
  tokens = small.tokens(cfg, 2, LENGTH)
  whole = small.logits(cfg, Batch.of(tokens))
  parts, _ = fed(cfg, tokens, calls)
  seen = ~np.isnan(parts[..., 0])
  assert seen.sum(1).tolist() == [sum(c[b] for c in calls) for b in range(2)]
  error = np.abs(parts - whole)[seen].max()
  assert error <= LOGIT_TOLERANCE * np.abs(whole).max()


# Everyday: every sparse mode and a scanned run of layers; the others with the slow tests.
@pytest.mark.parametrize(
  "cfg",
  [cfg if i < 2 else pytest.param(cfg, marks=pytest.mark.slow) for i, cfg in enumerate(FIXED)],
  ids=lambda cfg: cfg.model.schedule,
)
def test_ragged_chunks_equal_the_whole(cfg):
  if any(s.is_sparse for s in cfg.model.layers):
    assert cfg.model.top_k < LENGTH // 4, "something must be left out of the selection"
  check_chunks(cfg)


def test_one_by_one_equals_the_whole():
  check_chunks(FIXED[0], ((1, 1),) * LENGTH)


def test_a_ragged_prompt_goes_on_token_by_token():
  check_chunks(FIXED[0], ((9, 2), *((1, 1),) * 12, (0, 9), *((1, 1),) * 5))


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=6)
@given(configs())
def test_ragged_chunks_equal_the_whole_on_random_schedules(cfg):
  check_chunks(cfg)


def test_the_same_calls_leave_the_same_rings_however_the_rows_are_cut():
  cfg = FIXED[0]
  tokens = small.tokens(cfg, 2, LENGTH)
  _, one = fed(cfg, tokens, ((9, 9), (9, 9), (1, 1)))
  _, other = fed(cfg, tokens, ((1, 1), (9, 9), (9, 9)))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert a.shape == b.shape
    if a.dtype != jnp.float32:
      np.testing.assert_array_equal(a, b)
  for a, b in zip(one.layers, other.layers, strict=True):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      np.testing.assert_allclose(x, y, atol=LOGIT_TOLERANCE * max(1.0, np.abs(y).max()))
