"""The window ring against a plain list of what was written."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse.cache import ring

ROWS = 2  # sequences of different lengths
WIDTH = 9  # of a call: of its tokens the first ones are valid
write, recent = jax.jit(ring.write), jax.jit(ring.recent, static_argnums=2)


def empty(window):
  return ring.Ring(jnp.zeros((ROWS, window, 1)), jnp.full((ROWS, window), ring.EMPTY, jnp.int32))


def written(window, calls):
  """(the ring after these calls, the length of each sequence); row p of sequence b is 100 b + p."""
  state, length = empty(window), np.zeros(ROWS, int)
  for counts in map(np.asarray, calls):
    positions = length[:, None] + np.arange(WIDTH)
    rows = (100 * np.arange(ROWS)[:, None] + positions)[..., None]
    valid = np.arange(WIDTH) < counts[:, None]
    state = write(state, *map(jnp.asarray, (rows.astype(np.float32), positions, valid)))
    length = length + counts
  return state, length


CALLS = st.lists(st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)), max_size=5)
WINDOWS = st.sampled_from([1, 4, 5])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(WINDOWS, CALLS, st.sampled_from([0, 3, 6]))
def test_recent_rows_are_those_of_the_last_positions(window, calls, count):
  state, length = written(window, calls)
  rows, tags, stale = recent(state, jnp.asarray(length, jnp.int32), count)
  positions = length[:, None] + np.arange(-count, 0)
  kept = (positions >= 0) & (positions >= length[:, None] - window)
  np.testing.assert_array_equal(tags, np.where(kept, positions, ring.EMPTY))
  want = 100 * np.arange(ROWS)[:, None] + positions
  np.testing.assert_array_equal(np.asarray(rows)[..., 0][kept], want[kept])
  assert not stale.any()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(WINDOWS, CALLS)
def test_position_p_stands_in_slot_p_mod_w(window, calls):
  state, length = written(window, calls)
  for b in range(ROWS):
    for p in range(max(0, length[b] - window), length[b]):
      assert state.tags_BxW[b, p % window] == p
      assert state.rows_BxWxC[b, p % window, 0] == 100 * b + p


def test_a_row_of_another_position_never_takes_part_and_is_reported():
  state, length = written(4, [(6, 6)])
  stale = ring.Ring(state.rows_BxWxC, state.tags_BxW.at[1, 5 % 4].set(1))  # from a lap before
  _, tags, bad = ring.recent(stale, jnp.asarray(length, jnp.int32), 3)
  np.testing.assert_array_equal(tags, [[3, 4, 5], [3, 4, -1]])
  np.testing.assert_array_equal(bad, [False, True])
