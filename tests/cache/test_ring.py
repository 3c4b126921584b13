"""The window ring against a plain list of what was written."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hysparse_kernels.formats import Stored

from hysparse.cache import ring

LAYERS, ROWS = 2, 2  # sequences of different lengths
WIDTH = 9  # of a call: of its tokens the first ones are valid
write, recent = jax.jit(ring.write), jax.jit(ring.recent, static_argnums=2)


def empty(window):
  """Of two layers."""
  rows = Stored.plain(jnp.zeros((LAYERS, ROWS, window, 1)))
  return ring.Ring(rows, jnp.full((LAYERS, ROWS, window), ring.EMPTY, jnp.int32))


def written(window, calls):
  """(the ring after these calls, the length of each sequence); row p of sequence b is 100 b + p.

  In the second layer it is half more.
  """
  state, length = empty(window), np.zeros(ROWS, int)
  for counts in map(np.asarray, calls):
    positions = length[:, None] + np.arange(WIDTH)
    rows = (100 * np.arange(ROWS)[:, None] + positions)[..., None]
    valid = np.arange(WIDTH) < counts[:, None]
    both = jnp.asarray(np.stack([rows, rows + 0.5]), jnp.float32)
    state = write(state, Stored.plain(both), jnp.asarray(positions), jnp.asarray(valid))
    length = length + counts
  return state, length


CALLS = st.lists(st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)), max_size=5)
WINDOWS = st.sampled_from([1, 4, 5])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(WINDOWS, CALLS, st.sampled_from([0, 3, 6]))
def test_recent_rows_are_those_of_the_last_positions(window, calls, count):
  state, length = written(window, calls)
  second = jax.tree.map(lambda x: x[1], state)
  rows, tags, stale = recent(second, jnp.asarray(length, jnp.int32), count)
  positions = length[:, None] + np.arange(-count, 0)
  kept = (positions >= 0) & (positions >= length[:, None] - window)
  np.testing.assert_array_equal(tags, np.where(kept, positions, ring.EMPTY))
  want = 100 * np.arange(ROWS)[:, None] + positions
  np.testing.assert_array_equal(np.asarray(rows.decode())[..., 0][kept], want[kept] + 0.5)
  assert not stale.any()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(WINDOWS, CALLS)
def test_position_p_stands_in_slot_p_mod_w(window, calls):
  state, length = written(window, calls)
  for b in range(ROWS):
    for p in range(max(0, length[b] - window), length[b]):
      for layer in range(LAYERS):
        assert state.tags_BxW[layer, b, p % window] == p
        assert state.rows.decode()[layer, b, p % window, 0] == 100 * b + p + layer / 2


def test_a_row_of_another_position_never_takes_part_and_is_reported():
  state, length = written(4, [(6, 6)])
  state = jax.tree.map(lambda x: x[0], state)
  stale = ring.Ring(state.rows, state.tags_BxW.at[1, 5 % 4].set(1))  # from a lap before
  _, tags, bad = ring.recent(stale, jnp.asarray(length, jnp.int32), 3)
  np.testing.assert_array_equal(tags, [[3, 4, 5], [3, 4, -1]])
  np.testing.assert_array_equal(bad, [False, True])
