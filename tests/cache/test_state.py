"""What a cache refuses, and what it reports."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import small

from hysparse.cache import state
from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch


def test_sizes_are_checked():
  cfg = small.config(max_positions=100)
  for batch, tokens, word in ((0, 5, "batch"), (1, 0, "max_tokens"), (1, 101, "101")):
    with pytest.raises(state.CacheError, match=word):
      allocate(cfg, batch, tokens)


@pytest.mark.slow
def test_a_sequence_that_outgrows_its_cache_is_reported_and_the_others_go_on():
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  cache = allocate(cfg, 2, 12, block_tokens=4)
  for counts in ((8, 4), (8, 4)):
    valid = jnp.arange(8) < jnp.asarray(counts)[:, None]
    batch = dataclasses.replace(Batch.of(small.tokens(cfg, 2, 8)), valid_BxS=valid)
    cache = small.compiled(graphdef, weights, batch, cache).cache
  np.testing.assert_array_equal(cache.error_B, [True, False])
  with pytest.raises(state.CacheError, match=r"\[0\] of lengths \[16\]"):
    cache.check()


@pytest.mark.slow
def test_a_stale_ring_row_is_reported_by_the_model():
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  batch = Batch.of(small.tokens(cfg, 2, 8))
  cache = small.compiled(graphdef, weights, batch, allocate(cfg, 2, 32)).cache
  cache.check()
  (layers,) = cache.layers
  stale = dataclasses.replace(layers.window, tags_BxW=layers.window.tags_BxW.at[1, 0, 2].add(-4))
  cache = dataclasses.replace(cache, layers=(dataclasses.replace(layers, window=stale),))
  with pytest.raises(state.CacheError, match=r"sequences \[0\]"):
    small.compiled(graphdef, weights, batch, cache).cache.check()


def test_padding_in_front_of_tokens_is_reported():
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  tokens = small.tokens(cfg, 2, 8)
  right = Batch.of(tokens, jnp.asarray([8, 3]))
  wrong = dataclasses.replace(right, valid_BxS=right.valid_BxS[:, ::-1])
  for batch, bad in ((right, [False, False]), (wrong, [False, True])):
    cache = small.compiled(graphdef, weights, batch, allocate(cfg, 2, 32)).cache
    np.testing.assert_array_equal(cache.error_B, bad)


@pytest.mark.parametrize(("room", "outgrown"), [(16, False), (15, True)])
def test_the_last_token_that_fits(room, outgrown):
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  cache = allocate(cfg, 2, room, block_tokens=1)
  for _ in range(2):
    batch = Batch.of(small.tokens(cfg, 2, 8))
    cache = small.compiled(graphdef, weights, batch, cache).cache
  np.testing.assert_array_equal(cache.error_B, [outgrown, outgrown])
  # Once wrong, a sequence stays wrong, whatever follows.
  marked = dataclasses.replace(
    allocate(cfg, 2, room, block_tokens=1), error_B=jnp.asarray([True, False])
  )
  after = small.compiled(graphdef, weights, Batch.of(small.tokens(cfg, 2, 8)), marked).cache
  np.testing.assert_array_equal(after.error_B, [True, False])
