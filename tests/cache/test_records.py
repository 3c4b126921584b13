"""A sequence's state leaves a cache as bytes and continues in another, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest
import small
from paged_calls import CFG, SEQUENCES, call, fed, fresh, reserved, text

from hysparse.cache import records
from hysparse.cache.layout import layout
from hysparse.cache.records import Record
from hysparse.cache.state import CacheError

LENGTHS = (13, 2, 21)


@pytest.fixture(scope="module")
def cache():
  cache, pool = fresh()
  return fed(reserved(cache, pool, [24, 8, 24]), [text(n, n) for n in LENGTHS])[1]


@pytest.fixture(scope="module")
def record(cache):
  return records.take(cache, CFG.model, 2)


def other_cache():
  """Slot 0 has its blocks elsewhere than slot 2 of the first cache."""
  cache, pool = fresh()
  cache = reserved(cache, pool, [0, 8, 0])
  return reserved(cache, pool, [32, 8, 0])


@pytest.mark.parametrize("slot", range(SEQUENCES))
def test_it_has_the_bytes_of_the_layout(cache, slot):
  taken = records.take(cache, CFG.model, slot)
  described = layout(CFG.model, cache.precision, block_tokens=cache.pages.tokens)
  assert taken.tokens == LENGTHS[slot]
  for lifetime in ("global", "bounded"):
    names = {c.name for c in described.of(lifetime)}
    held = sum(x.nbytes for name, x in taken.rows.items() if name.split("/")[0] in names)
    assert held == described.bytes_at(lifetime, LENGTHS[slot])
  assert taken.bytes == sum(described.bytes_at(of, LENGTHS[slot]) for of in ("global", "bounded"))


def test_a_sequence_continues_in_another_cache(cache, record):
  again = Record.from_bytes(record.to_bytes())
  moved = records.put(other_cache(), CFG.model, 0, again)
  assert moved.pages.table_BxJ[0].tolist() != cache.pages.table_BxJ[2].tolist()
  more = text(4, 5)
  tokens = np.stack([more] * SEQUENCES)
  want = call(cache, tokens, [0, 0, 3]).logits_BxNxV[2, :3]
  got = call(moved, tokens, [3, 0, 0])
  got.cache.check()
  np.testing.assert_array_equal(got.logits_BxNxV[0, :3], want)
  taken = records.take(moved, CFG.model, 0)
  jax.tree.map(np.testing.assert_array_equal, dict(taken.rows), dict(record.rows))


def test_what_does_not_fit_is_refused(cache, record):
  empty, model = other_cache(), CFG.model
  with pytest.raises(CacheError, match="has 21 tokens; slot 1 has blocks for 8"):
    records.put(empty, model, 1, record)
  other = small.config("swa full/4", window=5, train={"numerics": "kvquant"}).model
  with pytest.raises(CacheError, match="is of another model, schedule, precision or block size"):
    records.put(fresh(small.config("swa full/4", window=5))[0], other, 0, record)
  name = next(iter(record.rows))
  for rows, found in (
    ({k: v for k, v in record.rows.items() if k != name}, "has none"),
    (record.rows | {name: record.rows[name][1:]}, r"has uint8 \["),
    (record.rows | {name: record.rows[name].astype(np.int8)}, r"has int8 \["),
  ):
    with pytest.raises(CacheError, match=f"record: {name} {found}"):
      records.put(empty, model, 0, dataclasses.replace(record, rows=rows))


def test_bytes_that_are_no_record_are_refused(record):
  data = record.to_bytes()
  newer = data.replace(b'"version":"1"', b'"version":"2"')
  assert newer != data
  with pytest.raises(CacheError, match="has version 2; must be 1"):
    Record.from_bytes(newer)
  for damaged in (b"", data[:5], data[:200], data[:-1], b"\x00" * 100, b"{}" * 50):
    with pytest.raises(CacheError, match="record: is damaged, or no record"):
      Record.from_bytes(damaged)
