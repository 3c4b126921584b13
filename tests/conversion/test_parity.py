"""Our model against what the published code gave for the checkpoints in tests/golden.

The everyday run holds the strict tests: end to end in exact mode, and every layer alone in exact
and kvquant mode for one case. The rest takes long to compile.
"""

import dataclasses
import functools
import pathlib

import numpy as np
import pytest

import hysparse
from hysparse.conversion import parity, parity_case

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = ("tiny-text", "tiny-vision")


@functools.cache
def golden(name: str) -> tuple[parity_case.Case, "hysparse.conversion.load.Loaded"]:
  return parity_case.read(GOLDEN / name), hysparse.load(GOLDEN / name)


def grid(everyday: set[tuple[str, str]]) -> list:
  """Every case in every mode; those that are not for every day are marked slow."""
  pairs = [(case, mode) for case in CASES for mode in parity_case.MODES]
  return [
    pytest.param(*pair, marks=[] if pair in everyday else pytest.mark.slow, id="-".join(pair))
    for pair in pairs
  ]


def bad_lines(report: parity.Report) -> list[str]:
  return [line for line in report.lines() if line.startswith(("FAIL", "MISS"))]


def end_to_end(name: str, mode: str, runs: str) -> parity.Report:
  """Compares what the named runs store."""
  case, loaded = golden(name)
  left_out = [run.name for run in case.runs if run.name not in runs]
  expected = {n: x for n, x in case.expected.items() if not {*n.split("/")} & {*left_out}}
  kept = tuple(run for run in case.runs if run.name in runs)
  case = dataclasses.replace(case, runs=kept, expected=expected, layers={})
  ours = parity.Outputs(parity.run_all(loaded.config, loaded.state, case, [mode]), {})
  return parity.compare(loaded.config.model, case, ours, [mode])


@pytest.mark.parametrize(("name", "mode"), grid(set()))
def test_end_to_end(name, mode):
  report = end_to_end(name, mode, "AB")
  assert report.ok, "\n".join(bad_lines(report))
  assert len(report.checks) > 40


@pytest.mark.parametrize(("name", "mode"), grid({("tiny-text", "exact")}))
def test_layers(name, mode):
  case, loaded = golden(name)
  ours = parity.Outputs({}, parity.run_layers(loaded.config, loaded.state, case, [mode]))
  layers = dataclasses.replace(case, expected={})
  report = parity.compare(loaded.config.model, layers, ours, [mode])
  assert report.ok, "\n".join(bad_lines(report))
  assert len(report.checks) >= 3 * len(loaded.config.model.layers)


@pytest.mark.slow
def test_plain_weights_give_the_same():
  case, _ = golden("tiny-text")
  plain = hysparse.load(GOLDEN / "tiny-text", dequantise="f32")
  ours = parity.Outputs({}, parity.run_layers(plain.config, plain.state, case, ["exact"]))
  report = parity.compare(
    plain.config.model, dataclasses.replace(case, expected={}), ours, ["exact"]
  )
  assert report.ok, "\n".join(bad_lines(report))


# --- Nothing is passed over: a model that gives exactly what is stored, and one array changed -----


def perfect(case: parity_case.Case) -> parity.Outputs:
  return parity.Outputs(dict(case.expected), dict(case.layers))


def compared(name: str, case: parity_case.Case, ours: parity.Outputs) -> parity.Report:
  return parity.compare(golden(name)[1].config.model, case, ours, case.modes)


@pytest.mark.parametrize("name", CASES)
def test_every_array_is_compared_or_an_input(name):
  case, _ = golden(name)
  report = compared(name, case, perfect(case))
  assert report.ok
  seen = [check.name for check in report.checks] + [array for array, _ in report.inputs]
  assert sorted(seen) == sorted([*case.expected, *case.layers])
  kinds = {array.rsplit("/", 1)[-1] for array, _ in report.inputs}
  assert kinds <= {*parity_case.INPUTS, "decode_logits_as_shipped"}


def spoilt(array: np.ndarray) -> np.ndarray:
  """Every number wrong, by several times the numbers themselves; of the same kind."""
  if array.dtype == bool:
    return ~array
  if array.dtype.kind == "f":
    return array + np.float32(4 * np.sqrt((array.astype(np.float64) ** 2).mean()))
  return np.where(array < 0, array, array + (array.max() + 1))  # none of the old numbers is left


def failures_with(name: str, array: str, changed: np.ndarray) -> list[str]:
  """What fails if a stored array is another, among those of its mode and run or layer."""
  case, _ = golden(name)
  group = "/".join(array.split("/")[:2])
  part = "layers" if array in case.layers else "expected"
  kept = {n: x for n, x in getattr(case, part).items() if n.startswith(group)}
  alone = dataclasses.replace(case, **{"expected": {}, "layers": {}, part: kept | {array: changed}})
  return [check.name for check in compared(name, alone, perfect(case)).failed]


@pytest.mark.parametrize("name", CASES)
def test_an_array_that_is_wrong_fails_whatever_it_is(name):
  case, _ = golden(name)
  for array, x in (case.expected | case.layers).items():
    if parity_case.not_comparable(array) is None:
      assert array in failures_with(name, array, spoilt(x)), array


@pytest.mark.parametrize("name", CASES)
def test_one_changed_number_fails_where_the_comparison_is_strict(name):
  """In exact mode a single value off by a thousandth of the array's scale is seen."""
  case, _ = golden(name)
  for array, x in (case.expected | case.layers).items():
    if array.startswith(("kvquant/", "official/")) or parity_case.not_comparable(array):
      continue
    changed = x.copy()
    at = np.unravel_index(x.size // 2, x.shape)
    if x.dtype == bool:
      changed[at] = ~x[at]
    else:
      changed[at] += np.float32(1e-3 * np.abs(x).max()) if x.dtype.kind == "f" else 1
    assert array in failures_with(name, array, changed), array


def test_an_array_that_the_model_does_not_give_is_missed():
  case, _ = golden("tiny-text")
  ours = perfect(case)
  del ours.expected["exact/A/layer3/candidates"]
  report = compared("tiny-text", case, ours)
  assert not report.ok and not report.failed
  assert report.missed == (("exact/A/layer3/candidates", "our model gives no such array"),)


def test_an_array_of_an_unknown_kind_is_missed():
  case, _ = golden("tiny-text")
  more = {**case.expected, "exact/A/layer3/surprise": np.zeros(3)}
  report = compared("tiny-text", dataclasses.replace(case, expected=more), perfect(case))
  assert not report.ok and report.missed[0][0] == "exact/A/layer3/surprise"
  case = dataclasses.replace(case, expected=more)
  report = compared("tiny-text", case, perfect(case))
  assert report.missed == (("exact/A/layer3/surprise", "no rule compares such an array"),)


def test_a_case_may_lack_parts():
  """Without layers.npz, drafts, Engram and candidates there is less to compare, and it passes."""
  case, _ = golden("tiny-text")
  left = {
    array: x
    for array, x in case.expected.items()
    if not any(word in array for word in ("dspark", "engram", "candidates", "main_hidden"))
  }
  case = dataclasses.replace(case, expected=left, layers={})
  report = compared("tiny-text", case, perfect(case))
  assert report.ok and len(report.checks) > 50


def test_a_mode_that_the_case_lacks_is_refused():
  case, loaded = golden("tiny-text")
  with pytest.raises(parity.CaseError, match="mode: is 'half'; the case has exact, kvquant"):
    parity.check(loaded.config, loaded.state, case, ["half"])


def test_a_report_without_a_comparison_is_not_ok():
  assert not parity.Report((), (), (), ()).ok
