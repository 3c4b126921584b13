"""Who holds which block, and that sequences which share or follow one another never disturb."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cache_meaning import assert_same_meaning, meaning
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_calls import BLOCK, CFG, POOL, ROOM, SEQUENCES, WIDTH, call, fed, fresh, reserved, text

from hysparse.cache.blocks import BlockPool, OutOfBlocks, clear, fork

# The same rows in the same shapes: only a different partner in a matrix product may differ.
SAME_SHAPE_TOLERANCE = 1e-6
PLACES, BLOCKS = ROOM // BLOCK, POOL // BLOCK

EMPTY = fresh()
ACTIONS = st.one_of(
  st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(0, ROOM + BLOCK)),
  st.tuples(st.just("share"), st.integers(0, 2), st.integers(0, 2), st.integers(0, ROOM)),
  st.tuples(st.just("release"), st.integers(0, 2)),
)


def tables(pool, cache):
  """Blocks of each slot in order; behind them the table is empty."""
  held = []
  for row in np.asarray(pool.install(cache).pages.table_BxJ).tolist():
    count = next((i for i, block in enumerate(row) if block < 0), PLACES)
    assert row[count:] == [-1] * (PLACES - count)
    held.append(row[:count])
  return held


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(ACTIONS, max_size=12))
@example([("reserve", 0, 40), ("reserve", 1, 24), ("share", 0, 2, 9)])  # no block for the copy
def test_blocks_are_held_as_a_plain_list_says(actions):
  cache, _ = EMPTY
  pool = BlockPool(cache)
  held = [[] for _ in range(SEQUENCES)]  # blocks of each slot
  for name, *arguments in actions:
    before, free = tables(pool, cache), pool.free
    slot, *more = arguments
    refused = None
    if name == "reserve":
      need = -(-more[0] // BLOCK) - len(held[slot])
      assert pool.missing(slot, more[0]) == max(0, need)
      if need > 0 and (len(held[slot]) + need > PLACES or need > free):
        refused = OutOfBlocks
    elif name == "share":
      target, tokens = more
      if held[target] or tokens > len(held[slot]) * BLOCK:
        refused = ValueError
      elif tokens % BLOCK and not free:
        refused = OutOfBlocks
    if refused:
      with pytest.raises(refused):
        getattr(pool, name)(*arguments)
      assert tables(pool, cache) == before and pool.free == free, "a refusal changed something"
      continue
    told = getattr(pool, name)(*arguments)
    after = tables(pool, cache)
    used = {block for row in held for block in row}
    if name == "reserve":
      new = after[slot][len(held[slot]) :]
      assert len(new) == max(0, need) and not used & set(new)
      held[slot] = held[slot] + new
    elif name == "share":
      full = held[slot][: tokens // BLOCK]
      held[target] = list(full)
      if tokens % BLOCK:
        begun, copy = told
        assert begun == held[slot][tokens // BLOCK] and copy not in used
        held[target].append(copy)
      else:
        assert told is None
    else:
      held[slot] = []
    assert after == held
    assert pool.live() == len({block for row in held for block in row})
    assert pool.free + pool.live() == BLOCKS


def test_refusals_say_what_there_is():
  _, pool = fresh()
  pool.reserve(0, ROOM)
  with pytest.raises(
    OutOfBlocks, match="slot 0: 41 tokens; a sequence of this cache has at most 40"
  ):
    pool.reserve(0, ROOM + 1)
  with pytest.raises(
    OutOfBlocks, match="slot 1: 33 tokens need 5 more blocks of 8 tokens; 3 of 8 "
  ):
    pool.reserve(1, 33)
  pool.reserve(1, 24)
  with pytest.raises(OutOfBlocks, match="slot 2: no block is free for the one that slot 0 has beg"):
    pool.share(0, 2, 7)
  with pytest.raises(ValueError, match="slot 1: holds 3 blocks; release it first"):
    pool.share(0, 1, 5)
  with pytest.raises(ValueError, match="slot 1: has no blocks for 25 tokens"):
    pool.share(1, 2, 25)


def forked(lengths, source, target):
  """Two prompts of these lengths, and a third slot that continues one of them."""
  cache, pool = fresh()
  cache = reserved(cache, pool, [*lengths, 0])
  texts = [text(n, seed) for seed, n in enumerate(lengths)]
  _, cache = fed(cache, [*texts, text(0, 9)])
  return fork(cache, pool, source, target), pool


@pytest.mark.parametrize("length", [13, 16], ids=["begun_block", "full_blocks"])
def test_a_forked_sequence_goes_on_as_its_source(length):
  cache, pool = forked((7, length), 1, 2)
  assert pool.live() == 1 + 2 + (length % BLOCK > 0)
  assert_same_meaning(meaning(CFG, cache, 2), meaning(CFG, cache, 1))
  cache = reserved(cache, pool, [0, length + 9, length + 9])
  same = text(9, 5)
  logits, cache = fed(cache, [text(0, 9), same, same])
  cache.check()
  np.testing.assert_array_equal(logits[2], logits[1])
  assert_same_meaning(meaning(CFG, cache, 2), meaning(CFG, cache, 1))


@pytest.mark.parametrize("length", [13, 16], ids=["begun_block", "full_blocks"])
def test_what_is_written_to_one_never_reaches_the_other(length):
  cache, pool = forked((7, length), 1, 2)
  cache = reserved(cache, pool, [0, length + 9, length + 12])
  before = [meaning(CFG, cache, slot) for slot in (0, 1)]
  _, cache = fed(cache, [text(0, 9), text(0, 9), text(12, 6)])
  for slot in (0, 1):
    assert_same_meaning(meaning(CFG, cache, slot), before[slot])
  # Neither to what the source itself goes on with.
  own = meaning(CFG, cache, 2)
  logits, cache = fed(cache, [text(0, 9), text(9, 7), text(0, 9)])
  cache.check()
  assert_same_meaning(meaning(CFG, cache, 2), own)
  alone, pool = fresh()
  alone = reserved(alone, pool, [7, length + 9, 0])
  _, alone = fed(alone, [text(7, 0), text(length, 1), text(0, 9)])
  want, _ = fed(alone, [text(0, 9), text(9, 7), text(0, 9)])
  np.testing.assert_allclose(logits[1], want[1], atol=SAME_SHAPE_TOLERANCE * np.abs(want[1]).max())


def test_blocks_of_a_finished_sequence_serve_another_one():
  cache, pool = fresh()
  cache = reserved(cache, pool, [16, 24, 24])
  assert not pool.free
  _, cache = fed(cache, [text(16, 0), text(23, 1), text(22, 2)])
  others = [meaning(CFG, cache, slot) for slot in (0, 2)]
  pool.release(1)
  cache = clear(cache, jnp.asarray([1]))
  cache = reserved(cache, pool, [0, 21, 0])
  empty = meaning(CFG, cache, 1)
  assert empty["length"] == 0 and (empty["history"] == -1).all() and not empty["drafts codes"].size
  logits, cache = fed(cache, [text(0, 9), text(21, 3), text(0, 9)])
  cache.check()
  fresh_cache, fresh_pool = fresh()
  fresh_cache = reserved(fresh_cache, fresh_pool, [0, 21, 0])
  want, fresh_cache = fed(fresh_cache, [text(0, 9), text(21, 3), text(0, 9)])
  np.testing.assert_allclose(logits[1], want[1], atol=SAME_SHAPE_TOLERANCE * np.abs(want[1]).max())
  assert_same_meaning(meaning(CFG, cache, 1), meaning(CFG, fresh_cache, 1))
  for slot, before in zip((0, 2), others, strict=True):
    assert_same_meaning(meaning(CFG, cache, slot), before)


def test_clearing_forgets_an_error():
  cache, _ = fresh()
  wrong = dataclasses.replace(cache, error_B=jnp.asarray([True, True, False]))
  np.testing.assert_array_equal(clear(wrong, jnp.asarray([1])).error_B, [True, False, False])


def test_the_order_of_blocks_changes_nothing():
  texts = [text(n, seed) for seed, n in enumerate((16, 9, 12))]
  results = []
  for blocks in (np.arange(BLOCKS), np.random.default_rng(0).permutation(BLOCKS)):
    cache, _ = fresh()
    table = np.full((SEQUENCES, PLACES), -1, np.int32)
    table[:, :2] = blocks[: 2 * SEQUENCES].reshape(SEQUENCES, 2)
    pages = dataclasses.replace(cache.pages, table_BxJ=jnp.asarray(table))
    logits, cache = fed(dataclasses.replace(cache, pages=pages), texts)
    cache.check()
    results.append((logits, [meaning(CFG, cache, slot) for slot in range(SEQUENCES)]))
  (one, said), (other, also) = results
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(said, also, strict=True):
    assert_same_meaning(a, b)


def test_a_call_beyond_the_blocks_is_an_error_of_that_sequence_alone():
  cache, pool = fresh()
  cache = reserved(cache, pool, [8, 16, 0])
  for counts in ((4, 4, 0), (4, 4, 0), (1, 4, 1)):
    output = call(cache, np.zeros((SEQUENCES, WIDTH)), counts)
    cache = output.cache
  np.testing.assert_array_equal(output.cache.error_B, [True, False, True])
  assert np.isfinite(output.logits_BxNxV).all()
