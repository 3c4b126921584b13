"""Entries of a paged pool against a plain dictionary of what was put where."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hysparse_kernels.formats import Stored
from hysparse_kernels.paged import Paged

SEQUENCES, PLACES, BLOCK = 3, 4, 2  # blocks that a table has places for, entries in a block
BLOCKS, WIDTH = 9, 5  # blocks of the pool, entries of one write
ENTRIES = PLACES * BLOCK
UNTOUCHED = 77.0


@jax.jit
def put(paged, ids, values, valid):
  return paged.put(ids, Stored.plain(values), valid)


@jax.jit
def seen(paged, ids_N):
  """What there is at `ids_N` by each way of reading it."""
  each_BxN = jnp.broadcast_to(ids_N, (SEQUENCES, len(ids_N)))
  found = paged.locate(each_BxN)
  deep = paged.locate(each_BxN.reshape(SEQUENCES, -1, 2)).reshape(found.shape)
  return found, deep, paged.read(ids_N).decode(), paged.values(jnp.float32)


def empty_pool(rows=BLOCKS * BLOCK):
  return Stored.plain(jnp.full((rows, 2), UNTOUCHED))


@st.composite
def tables(draw):
  """Blocks in any order, each held by one sequence at most, with gaps."""
  blocks = list(draw(st.permutations(range(BLOCKS))))
  held = draw(st.lists(st.booleans(), min_size=SEQUENCES * PLACES, max_size=SEQUENCES * PLACES))
  table = [blocks.pop() if there and blocks else -1 for there in held]
  return np.reshape(table, (SEQUENCES, PLACES))


# Writes: for each sequence different ids, also such as have no place, and whether each is valid.
IDS = st.lists(
  st.integers(-2, ENTRIES + 3).map(lambda i: -1 if i < 0 else i),
  min_size=WIDTH, max_size=WIDTH,
  unique_by=lambda i: i if i >= 0 else object(),
)  # fmt: skip
WRITES = st.lists(
  st.tuples(
    st.lists(IDS, min_size=SEQUENCES, max_size=SEQUENCES),
    st.lists(st.booleans(), min_size=SEQUENCES * WIDTH, max_size=SEQUENCES * WIDTH),
  ),
  max_size=3,
)


def written(paged, writes, has_block):
  """(the pool after these writes, what a dictionary holds of them)."""
  held, count = {}, 0
  for ids, valid in writes:
    valid = np.reshape(valid, (SEQUENCES, WIDTH))
    values = np.arange(count, count + SEQUENCES * WIDTH, dtype=np.float32) + 1
    values = values.reshape(SEQUENCES, WIDTH)
    count += SEQUENCES * WIDTH
    rows = jnp.asarray(np.stack([values, -values], axis=-1))
    paged = put(paged, jnp.asarray(ids, jnp.int32), rows, jnp.asarray(valid))
    for b, n in np.ndindex(SEQUENCES, WIDTH):
      entry = ids[b][n]
      if valid[b, n] and 0 <= entry < ENTRIES and has_block(b, entry):
        held[b, entry] = values[b, n]
  return paged, held


def check(paged, held, row_of):
  """Every way of reading gives what the dictionary holds; `row_of` is None where nothing can be."""
  ids = np.arange(-1, ENTRIES + 3)
  found, deep, read, whole = map(np.asarray, seen(paged, jnp.asarray(ids, jnp.int32)))
  np.testing.assert_array_equal(found, deep)
  pool = np.asarray(paged.rows.decode())
  assert whole.shape == (SEQUENCES, ENTRIES, 2)
  for b, (n, entry) in ((b, pair) for b in range(SEQUENCES) for pair in enumerate(ids)):
    row = row_of(b, entry) if 0 <= entry < ENTRIES else None
    assert found[b, n] == (-1 if row is None else row)
    if row is not None:
      value = held.get((b, int(entry)))
      want = [UNTOUCHED, UNTOUCHED] if value is None else [value, -value]
      for got in (pool[row], read[b, n], whole[b, entry]):
        np.testing.assert_array_equal(got, want)
  rows = {row_of(*key) for key in held}
  others = [row for row in range(len(pool)) if row not in rows]
  np.testing.assert_array_equal(pool[others], UNTOUCHED)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(tables(), WRITES)
def test_entries_through_a_table(table, writes):
  def row_of(b, entry):
    block = table[b, entry // BLOCK]
    return None if block < 0 else block * BLOCK + entry % BLOCK

  paged = Paged(empty_pool(), jnp.asarray(table, jnp.int32), BLOCK)
  assert paged.entries == ENTRIES
  paged, held = written(paged, writes, lambda b, entry: row_of(b, entry) is not None)
  check(paged, held, row_of)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(WRITES)
def test_entries_side_by_side(writes):
  rows = jax.tree.map(lambda x: x.reshape(SEQUENCES, ENTRIES, -1), empty_pool(SEQUENCES * ENTRIES))
  paged = Paged.contiguous(rows)
  assert paged.entries == ENTRIES and paged.rows.shape == (SEQUENCES * ENTRIES, 2)
  paged, held = written(paged, writes, lambda b, entry: True)
  check(paged, held, lambda b, entry: b * ENTRIES + entry)


def test_a_block_of_two_sequences_is_read_by_both():
  table = jnp.asarray([[4, 1, -1, -1], [4, 2, -1, -1], [-1] * 4], jnp.int32)
  paged = Paged(empty_pool(), table, BLOCK)
  ids = jnp.asarray([[0, 1, 2, 3, -1], [2, 3, -1, -1, -1], [-1] * 5], jnp.int32)
  values = jnp.arange(30, dtype=jnp.float32).reshape(3, 5, 2)
  whole = np.asarray(put(paged, ids, values, jnp.ones((3, 5), bool)).values(jnp.float32))
  np.testing.assert_array_equal(whole[0, :4], values[0, :4])
  np.testing.assert_array_equal(whole[1, :2], values[0, :2])
  np.testing.assert_array_equal(whole[1, 2:4], values[1, :2])


def test_packed_rows_are_moved_as_they_are():
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.permutation(BLOCKS).reshape(SEQUENCES, -1), jnp.int32)

  @jax.jit
  def moved(x):
    rows = Stored.of(x, "fp4")
    pool = jax.tree.map(lambda x: jnp.zeros((BLOCKS * BLOCK, x.shape[-1]), x.dtype), rows)
    ids = jnp.broadcast_to(jnp.arange(WIDTH), (SEQUENCES, WIDTH))
    paged = Paged(pool, table, BLOCK).put(ids, rows, jnp.ones((SEQUENCES, WIDTH), bool))
    return rows, rows.decode(), paged.read(jnp.arange(WIDTH)), paged.values(jnp.float32)

  x = jnp.asarray(rng.normal(size=(SEQUENCES, WIDTH, 33)), jnp.float32)
  rows, decoded, read, values = moved(x)
  assert read.format == "fp4" and read.shape == x.shape
  for name, part in rows.parts.items():
    np.testing.assert_array_equal(read.parts[name], part)
  np.testing.assert_array_equal(values[:, :WIDTH], decoded)


def test_groups_are_the_rows_of_their_entries():
  """In one piece where blocks hold whole groups, entry by entry where they cut them."""
  table = jnp.asarray([[3, 1, -1, 5], [0, -1, 2, 4]], jnp.int32)
  values = jnp.arange(48, dtype=jnp.float32).reshape(24, 2)
  paged = Paged(Stored.plain(values), table, 4)
  for size in (1, 2, 4, 3):
    last = paged.entries // size
    groups = jnp.asarray([[0, last - 1, 1], [last - 1, 0, 1]], jnp.int32)
    ids = (groups[..., None] * size + jnp.arange(size)).reshape(2, -1)
    there = np.asarray(paged.locate(ids)).reshape(2, 3, size)
    got = np.asarray(paged.read_groups(groups, size).decode())
    assert got.shape == (2, 3, size, 2) and (there >= 0).any()
    np.testing.assert_array_equal(got[there >= 0], np.asarray(values)[there[there >= 0]])
  none = paged.read_groups(jnp.full((2, 1), -1, jnp.int32), 4)
  assert none.shape == (2, 1, 4, 2)
