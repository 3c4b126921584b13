"""Block sizes are data: the tables, their look-up, and what writes them."""

import json

import jax
import jax.numpy as jnp
import pytest
from hysparse_kernels import compat, dispatch, tuner, tuning
from hysparse_kernels.catalogue import OPERATIONS, Operation

TABLES = [
  (op, backend) for op in OPERATIONS if tuning.has_table(op) for backend in tuning.table(op)
]


@pytest.fixture
def own_table(tmp_path, monkeypatch):
  """A table of rows that differ by device and size."""
  file = tmp_path / "tuning.json"
  rows = [
    {"device": "tpu v6", "upto": {"queries": 8}, "sizes": {"block": 1}},
    {"device": "*", "upto": {"queries": 8}, "sizes": {"block": 2}},
    {"device": "*", "sizes": {"block": 3}},
  ]
  file.write_text(json.dumps({"xla": {"rows": rows, "candidates": [{"block": 4}]}}))
  monkeypatch.setattr(tuning, "path", lambda op: file)
  tuning.table.cache_clear()
  yield file
  tuning.table.cache_clear()


def test_the_first_row_that_fits_holds(own_table):
  assert tuning.sizes("moe", "xla", queries=8) == {"block": 2}
  assert tuning.sizes("moe", "xla", queries=9) == {"block": 3}
  with compat.target("tpu", device_kind="TPU v6 lite"):
    assert tuning.sizes("moe", "xla", queries=8) == {"block": 1}
    assert tuning.sizes("moe", "xla", queries=9) == {"block": 3}
  with tuning.using("moe", "xla", {"block": 7}):
    assert tuning.sizes("moe", "xla", queries=8) == {"block": 7}


def test_no_row_is_an_error(own_table):
  table = json.loads(own_table.read_text())
  del table["xla"]["rows"][2]
  own_table.write_text(json.dumps(table))
  with pytest.raises(LookupError, match=r"no row of 'xla' fits \{'queries': 9\}"):
    tuning.sizes("moe", "xla", queries=9)


@pytest.mark.parametrize(("op", "backend"), TABLES)
def test_tables_end_in_a_row_for_everything(op, backend):
  rows = tuning.table(op)[backend]["rows"]
  assert rows[-1]["device"] == "*" and "upto" not in rows[-1]
  fields = set(rows[-1]["sizes"])
  for row in rows:
    assert set(row["sizes"]) == fields
  for candidate in tuning.table(op)[backend]["candidates"]:
    assert set(candidate) == fields


def test_the_fastest_candidate_is_written_for_this_device(own_table):
  row = tuning.table("moe")["xla"]["rows"][1]
  seconds = (({"block": 2}, 0.5), ({"block": 4}, 0.25), ({"block": 9}, "no memory"))
  winner = tuner.Winner("moe", "xla", row, ("decode",), seconds)
  assert 'cannot run   {"block": 9}: no memory' in str(winner) and "250.000 ms *" in str(winner)
  for _ in range(2):  # a second time it is replaced
    winner.write()
    tuning.table.cache_clear()
    rows = tuning.table("moe")["xla"]["rows"]
    kind = jax.devices()[0].device_kind.lower()
    assert rows[1] == {"device": kind, "upto": {"queries": 8}, "sizes": {"block": 4}}
    assert len(rows) == 4
    winner = tuner.Winner("moe", "xla", rows[1], ("decode",), seconds)
  assert tuning.sizes("moe", "xla", queries=8) == {"block": 4}


class Spec:
  """Arguments of so many queries."""

  def __init__(self, name, queries):
    self.name, self.queries = name, queries

  def arguments(self):
    return {"x": jnp.ones(self.queries), "scale": 2.0}

  shapes = arguments


@pytest.fixture
def met(own_table, monkeypatch):
  """A stand-in for an operation whose small calls meet one row and whose large ones another.

  A list of the (queries, block) that were traced.
  """
  met = []

  def call(arguments, backend):
    sizes = tuning.sizes("moe", backend, queries=len(arguments["x"]))
    met.append((len(arguments["x"]), sizes["block"]))
    return arguments["x"] * arguments["scale"]

  specs = (Spec("decode", 4), Spec("prefill", 32), Spec("longer", 64))
  stand_in = Operation(
    call, (), {"xla": call}, released=specs, timed=("decode", "prefill", "longer")
  )
  monkeypatch.setitem(tuner.OPERATIONS, "moe", stand_in)
  return met


def test_candidates_are_timed_by_the_rows_that_calls_meet(met):
  small, large = tuner.tune("moe", "xla", rounds=1)
  assert (small.specs, large.specs) == (("decode",), ("prefill", "longer"))
  assert {n: {b for m, b in met if m == n} for n in (4, 32)} == {4: {2, 4}, 32: {3, 4}}
  assert all(seconds > 0 for _, seconds in (*small.seconds, *large.seconds))


def test_winners_of_two_rows_are_written_as_they_come(met, own_table, monkeypatch):
  """The first one's row moves the second one's down."""
  monkeypatch.setattr(tuner, "_seconds", lambda op, backend, spec, candidates, rounds: [2.0, 1.0])
  for winner in tuner.tune("moe", "xla", rounds=1):
    winner.write()
  tuning.table.cache_clear()
  kind = jax.devices()[0].device_kind.lower()
  rows = [
    (row["device"], row.get("upto"), row["sizes"]) for row in tuning.table("moe")["xla"]["rows"]
  ]
  upto, winner = {"queries": 8}, {"block": 4}
  assert rows == [
    ("tpu v6", upto, {"block": 1}),
    (kind, upto, winner),
    ("*", upto, {"block": 2}),
    (kind, None, winner),
    ("*", None, {"block": 3}),
  ]
  assert [file.name for file in own_table.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda text: text[:100], r"is no tuning table \("),
    (lambda text: "[1]", "must be an object of backends"),
    (lambda text: '{"xla": {"rows": []}}', "xla: must have 'rows' and 'candidates'"),
    (lambda text: '{"xla": {"rows": [], "candidates": []}}', "'rows' must be a list with a row"),
    (lambda text: text.replace('"device"', '"devise"', 1), "row 0 is .*must have device and"),
    (lambda text: text.replace('"block": 1', '"block": 0'), "row 0 is .*must be whole numbers"),
    (lambda text: text.replace('"block": 1', '"block": "1"'), "row 0 is .*must be whole numbers"),
    (lambda text: text.replace('"block": 2', '"blocks": 2'), "row 1 is .*must have the sizes"),
    (lambda text: text.replace('"tpu v6"', '"TPU v6"'), "row 0 is of device 'TPU v6'; must be in"),
    (lambda text: text.replace('"block": 4', '"blocks": 4'), "candidate .*must have the sizes"),
    (lambda text: text.replace('"queries": 8', '"queries": -8', 1), "row 0 is .*whole numbers"),
  ],
)
def test_a_file_that_is_no_table_is_named(own_table, change, message):
  changed = change(own_table.read_text())
  assert changed != own_table.read_text()
  own_table.write_text(changed)
  with pytest.raises(ValueError, match=rf"tuning\.json: .*{message}|tuning\.json: {message}"):
    tuning.sizes("moe", "xla", queries=8)


def test_a_bound_that_calls_do_not_have_is_named(own_table):
  own_table.write_text(own_table.read_text().replace('"queries": 8', '"heads": 8'))
  on_v6 = compat.target("tpu", device_kind="TPU v6 lite")
  with on_v6, pytest.raises(LookupError, match="has a bound of 'heads'; calls have queries"):
    tuning.sizes("moe", "xla", queries=8)


def test_a_table_or_backend_that_is_not_there_is_refused():
  for op in ("moe", "engram"):
    with pytest.raises(LookupError, match="there is no table for backend 'nothing'"):
      tuning.sizes(op, "nothing")
  with pytest.raises(LookupError, match="has no tuning table for backend 'nothing'"):
    next(tuner.tune("moe", "nothing"))
  with pytest.raises(dispatch.BackendError, match="runs on tpu"):
    next(tuner.tune("sparse_attention", "pallas_tpu"))
