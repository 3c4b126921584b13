"""A cache's arrays are those that the layout describes; what outgrows them is reported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from hysparse.cache import state
from hysparse.cache.layout import layout
from hysparse.nn.batch import Batch

DRAFTS = {
  "draft_layers": 2,
  "draft_block": 3,
  "draft_noise_id": 5,
  "draft_target_layers": (3, 6),
  "draft_markov_rank": 8,
}


@pytest.mark.parametrize(
  "cfg",
  [
    small.config(engram_layers=(1,), **DRAFTS),
    small.config("swa*3 full/3 reuse*2 full/1", window=5),
    small.config("mha gqa/2*2 dense/2 reuse", engram_layers=()),
  ],
  ids=lambda cfg: cfg.model.schedule,
)
@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_bytes_are_those_of_the_layout(cfg, tokens):
  batch = 3
  cache = state.allocate(cfg.model, batch, tokens)
  plain = dataclasses.replace(cfg.model, main_kv="f32", index_k="f32", window_kv="f32")
  described = layout(plain)
  arrays = jax.tree.leaves((cache.layers, cache.drafts))
  held = sum(x.nbytes for x in arrays if x.dtype == jnp.float32)
  # Plain keys and values are float32 here; the layout counts them as bfloat16.
  double = sum(c.bytes_at(tokens) for c in described.named("plain_kv"))
  history = sum(c.bytes_at(tokens) for c in described.named("engram_history"))
  counted = described.bytes_at("global", tokens) + described.bytes_at("bounded", tokens)
  assert held == batch * (counted + double - history)
  assert history == (0 if cache.history_BxL is None else cache.history_BxL.nbytes // batch)
  tags = sum(x.nbytes for x in arrays if x.dtype == jnp.int32)
  assert tags == batch * sum(c.bytes_at(tokens) for c in described.named("ring_tags"))


def test_sizes_are_checked():
  cfg = small.config(max_positions=100).model
  for batch, tokens, word in ((0, 5, "batch"), (1, 0, "max_tokens"), (1, 101, "101")):
    with pytest.raises(state.CacheError, match=word):
      state.allocate(cfg, batch, tokens)


def test_a_sequence_that_outgrows_its_cache_is_reported_and_the_others_go_on():
  cfg = small.config()
  graphdef, weights = small.model(cfg)
  cache = state.allocate(cfg.model, 2, 12)
  for counts in ((8, 4), (8, 4)):
    valid = jnp.arange(8) < jnp.asarray(counts)[:, None]
    batch = dataclasses.replace(Batch.of(small.tokens(cfg, 2, 8)), valid_BxS=valid)
    cache = small.compiled(graphdef, weights, batch, cache).cache
  np.testing.assert_array_equal(cache.error_B, [True, False])
  with pytest.raises(state.CacheError, match=r"\[0\] of lengths \[16\]"):
    cache.check()


def test_a_stale_ring_row_is_reported_by_the_model():
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  batch = Batch.of(small.tokens(cfg, 2, 8))
  cache = small.compiled(graphdef, weights, batch, state.allocate(cfg.model, 2, 32)).cache
  cache.check()
  (layers,) = cache.layers
  stale = dataclasses.replace(layers.ring, tags_BxW=layers.ring.tags_BxW.at[1, 0, 2].add(-4))
  cache = dataclasses.replace(cache, layers=(dataclasses.replace(layers, ring=stale),))
  with pytest.raises(state.CacheError, match=r"sequences \[0\]"):
    small.compiled(graphdef, weights, batch, cache).cache.check()


def test_padding_in_front_of_tokens_is_reported():
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  tokens = small.tokens(cfg, 2, 8)
  right = Batch.of(tokens, jnp.asarray([8, 3]))
  wrong = dataclasses.replace(right, valid_BxS=right.valid_BxS[:, ::-1])
  for batch, bad in ((right, [False, False]), (wrong, [False, True])):
    cache = small.compiled(graphdef, weights, batch, state.allocate(cfg.model, 2, 32)).cache
    np.testing.assert_array_equal(cache.error_B, bad)


@pytest.mark.parametrize(("room", "outgrown"), [(16, False), (15, True)])
def test_the_last_token_that_fits(room, outgrown):
  cfg = small.config("swa*2")
  graphdef, weights = small.model(cfg)
  cache = state.allocate(cfg.model, 2, room)
  for _ in range(2):
    batch = Batch.of(small.tokens(cfg, 2, 8))
    cache = small.compiled(graphdef, weights, batch, cache).cache
  np.testing.assert_array_equal(cache.error_B, [outgrown, outgrown])
  # Once wrong, a sequence stays wrong, whatever follows.
  marked = dataclasses.replace(
    state.allocate(cfg.model, 2, room), error_B=jnp.asarray([True, False])
  )
  after = small.compiled(graphdef, weights, Batch.of(small.tokens(cfg, 2, 8)), marked).cache
  np.testing.assert_array_equal(after.error_B, [True, False])
