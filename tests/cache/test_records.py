"""A sequence's state leaves a cache as bytes and continues in another, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import small
from compiling import compilations
from paged_calls import CFG, SEQUENCES, call, fed, fresh, reserved, text

from hysparse.cache import records
from hysparse.cache.blocks import clear, fork
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
  return records.take(cache, CFG, 2)


def other_cache():
  """Slot 0 has its blocks elsewhere than slot 2 of the first cache."""
  cache, pool = fresh()
  cache = reserved(cache, pool, [0, 8, 0])
  return reserved(cache, pool, [32, 8, 0])


@pytest.mark.parametrize("slot", range(SEQUENCES))
def test_it_has_the_bytes_of_the_layout(cache, slot):
  taken = records.take(cache, CFG, slot)
  described = layout(CFG.model, cache.precision, block_tokens=cache.pages.tokens)
  assert taken.tokens == LENGTHS[slot]
  for lifetime in ("global", "bounded"):
    names = {c.name for c in described.of(lifetime)}
    held = sum(x.nbytes for name, x in taken.rows.items() if name.split("/")[0] in names)
    assert held == described.bytes_at(lifetime, LENGTHS[slot])
  assert taken.bytes == sum(described.bytes_at(of, LENGTHS[slot]) for of in ("global", "bounded"))


def test_a_sequence_continues_in_another_cache(cache, record):
  again = Record.from_bytes(record.to_bytes())
  moved = records.put(other_cache(), CFG, 0, again)
  assert moved.pages.table_BxJ[0].tolist() != cache.pages.table_BxJ[2].tolist()
  more = text(4, 5)
  tokens = np.stack([more] * SEQUENCES)
  want = call(cache, tokens, [0, 0, 3]).logits_BxNxV[2, :3]
  got = call(moved, tokens, [3, 0, 0])
  got.cache.check()
  np.testing.assert_array_equal(got.logits_BxNxV[0, :3], want)
  taken = records.take(moved, CFG, 0)
  jax.tree.map(np.testing.assert_array_equal, dict(taken.rows), dict(record.rows))


def test_records_of_any_length_compile_few_programs(cache):
  """Rows are taken and put in few sizes, whatever the length of the sequence."""
  cache, pool = fresh()
  pool.reserve(0, 40)
  cache = pool.install(cache)
  origin = records.take(cache, CFG, 0)

  def moved(entries: int) -> None:
    rows = {}
    for name, x in origin.rows.items():
      per_token = name.split("/")[0] in ("main_kv", "index_keys")
      rows[name] = np.zeros((entries, *x.shape[1:]), np.uint8) if per_token else x
    full = dataclasses.replace(origin, tokens=4 * entries, rows=rows)
    copy = records.put(jax.tree.map(jnp.copy, cache), CFG, 0, full)
    assert records.take(copy, CFG, 0).tokens == 4 * entries

  moved(1)
  with compilations() as programs:
    moved(7)  # both in places for eight
  assert not programs, programs


def test_what_does_not_fit_is_refused(cache, record):
  empty = other_cache()
  with pytest.raises(CacheError, match="has 21 tokens; slot 1 has blocks for 8"):
    records.put(empty, CFG, 1, record)
  name = next(iter(record.rows))
  shape = list(record.rows[name].shape)
  for rows, found in (
    ({k: v for k, v in record.rows.items() if k != name}, f"{name} has none"),
    (record.rows | {name: record.rows[name][1:]}, rf"{name} has uint8 \["),
    (record.rows | {name: record.rows[name].astype(np.int8)}, rf"{name} has int8 \["),
    (record.rows | {"main_kv/9/codes": record.rows[name]}, "has 'main_kv/9/codes', which is no"),
  ):
    with pytest.raises(CacheError, match=f"record: {found}") as error:
      records.put(empty, CFG, 0, dataclasses.replace(record, rows=rows))
    assert "which is no" in found or f"must be uint8 {shape}" in str(error.value)
  for tokens in (-7, 13.5, True, "13"):
    with pytest.raises(CacheError, match=r"record.tokens: is .*; must be a whole number from 0 up"):
      dataclasses.replace(record, tokens=tokens)
  with pytest.raises(TypeError, match="record: is a bytes; must be a Record"):
    records.put(empty, CFG, 0, record.to_bytes())


@pytest.mark.parametrize(
  "change",
  [
    {"model": {"rope_theta": 77.0}},
    {"model": {"window": 5}},
    {"train": {"numerics": "official"}},
  ],
)
def test_a_record_of_another_config_is_refused(record, change):
  other = CFG
  for group, fields in change.items():
    of = dataclasses.replace(getattr(CFG, group), **fields)
    other = dataclasses.replace(other, **{group: of})
  with pytest.raises(CacheError, match="is of another model, schedule, precision, numerics"):
    records.put(fresh(other)[0], other, 0, record)


def test_a_cache_of_another_config_is_refused(cache, record):
  for other in (small.config("swa full/4", window=5), small.config("swa*2", window=3)):
    for act in (records.take, lambda *of: records.put(*of, record)):
      with pytest.raises(CacheError, match="cache: its arrays are not those that this model's"):
        act(cache, other, 0)
  with pytest.raises(TypeError, match="config: is a ModelConfig; must be the whole Config"):
    records.take(cache, CFG.model, 0)


@pytest.mark.parametrize("slot", [SEQUENCES, 99, -1, True, None, 1.0, "0"])
def test_slots_that_are_not_there_are_refused(cache, record, slot):
  for act in (records.take, lambda *of: records.put(*of, record)):
    with pytest.raises(CacheError, match=r"slot: is .*; must be a whole number in 0\.\.2"):
      act(cache, CFG, slot)


def test_only_whole_sequences_are_taken(cache):
  with pytest.raises(CacheError, match="slot 0: has not all rows of its 13 tokens"):
    records.take(cache.within(8), CFG, 0)
  broken, pool = fresh()
  broken = fed(reserved(broken, pool, [8, 0, 0]), [text(9, 0), text(0, 0), text(0, 0)])[1]
  with pytest.raises(CacheError, match=r"has not all rows of its \d+ tokens \(blocks for 8"):
    records.take(broken, CFG, 0)


def test_only_empty_slots_with_blocks_of_their_own_are_filled(cache, record):
  with pytest.raises(CacheError, match="slot 0: has 13 tokens; must be empty"):
    records.put(cache, CFG, 0, record)
  shared, pool = fresh()
  shared = fed(reserved(shared, pool, [24, 0, 0]), [text(9, 0), text(0, 0), text(0, 0)])[1]
  shared = clear(fork(shared, pool, 0, 1), np.asarray([1]))
  pool.reserve(1, 24)
  with pytest.raises(CacheError, match=r"slot 1: shares block \d with another sequence"):
    records.put(pool.install(shared), CFG, 1, record)


def test_a_cache_that_was_used_up_is_refused(record):
  old = other_cache()
  records.put(old, CFG, 0, record)
  with pytest.raises(CacheError, match="cache: was used up by a call that returned a new one"):
    records.take(old, CFG, 0)


def test_bytes_that_are_no_record_are_refused(record):
  data = record.to_bytes()
  newer = data.replace(b'"version":"2"', b'"version":"3"')
  assert newer != data
  with pytest.raises(CacheError, match="has version 3; must be 2"):
    Record.from_bytes(newer)
  older = safetensors.numpy.save(dict(record.rows), {"version": "1", "tokens": "21", "layout": ""})
  with pytest.raises(CacheError, match="has version 1; must be 2"):
    Record.from_bytes(older)
  for damaged in (b"", data[:5], data[:200], data[:-1], b"\x00" * 100, b"{}" * 50):
    with pytest.raises(CacheError, match="record: is damaged, or no record"):
      Record.from_bytes(damaged)
  assert Record.from_bytes(memoryview(data)).tokens == record.tokens


def test_every_changed_byte_is_noticed(record):
  data = record.to_bytes()
  body = 8 + int.from_bytes(data[:8], "little")
  assert len(data) - body == record.bytes
  for at in range(body, len(data)):
    changed = bytearray(data)
    changed[at] ^= 1 << at % 8
    with pytest.raises(CacheError, match="record: is damaged: its content"):
      Record.from_bytes(changed)
  longer = data.replace(b'"tokens":"21"', b'"tokens":"23"')
  assert longer != data
  with pytest.raises(CacheError, match="record: is damaged: its content"):
    Record.from_bytes(longer)
