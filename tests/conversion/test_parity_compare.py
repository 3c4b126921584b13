"""The measures and limits of the comparison, on small arrays."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from hysparse.conversion import parity_case, parity_compare
from hysparse.conversion.parity_compare import Check
from hysparse.conversion.parity_limits import KVQUANT_RMS, OFFICIAL_RMS, limits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = ("tiny-text", "tiny-vision")
EXACT = limits({}, "exact", None)
KVQUANT = limits({}, "kvquant", None)


def about(name: str) -> dict:
  return json.loads((GOLDEN / name / "case.json").read_text())


def test_nan_and_wrong_shapes_fail():
  assert not Check("x", "", np.nan, 1.0).passed
  assert Check("x", "", 1.0, 1.0).passed
  logits = np.zeros((2, 3, 4), np.float32)
  for bad in (np.full_like(logits, np.nan), logits[:, :2]):
    check = parity_compare.end_to_end(
      "exact/A/prefill_logits", {"exact/A/prefill_logits": bad},
      {"exact/A/prefill_logits": logits}, EXACT, None,
    )  # fmt: skip
    assert not check.passed


def test_selections_compare_as_sets():
  mine = np.array([[3, 1, -1], [0, 2, 5]])
  theirs = np.array([[1, 3, -1, -1], [2, 0, 4, -1]])
  sets = parity_compare.members(mine, theirs)
  assert parity_compare.differing_rows(*sets) == 1
  assert parity_compare.mismatch(*sets, None) == pytest.approx((0 + 1 / 3) / 2)


def test_a_row_without_a_choice_must_agree():
  sets = parity_compare.members(np.array([[0, 1], [0, 2]]), np.array([[0, 2], [0, 2]]))
  assert parity_compare.mismatch(*sets, np.array([True, False])) == 0.5
  assert parity_compare.mismatch(*sets, np.array([False, True])) == np.inf


def test_empty_selections_agree():
  none = np.full((2, 3), -1)
  assert parity_compare.mismatch(*parity_compare.members(none, none[:, :1]), None) == 0


def test_expert_weights_follow_their_experts():
  mine = parity_compare.by_expert(np.array([[2, 0]]), np.array([[0.3, 0.7]]), 3)
  theirs = parity_compare.by_expert(np.array([[0, 2]]), np.array([[0.7, 0.3]]), 3)
  assert (mine == theirs).all()


def test_equal_scores_may_be_swapped_and_others_not():
  scores = np.array([[5.0, 3.0, 3.0, 1.0]])
  first, second, wrong = (np.array([row]) for row in ([0, 1], [0, 2], [0, 3]))
  assert parity_compare.same_scores(*parity_compare.members(first, second), scores).all()
  assert not parity_compare.same_scores(*parity_compare.members(first, wrong), scores).any()


def test_drafts_are_greedy_in_their_own_logits():
  logits = np.eye(4, dtype=np.float32)[None, [1, 2]]  # [1, 2, 4]: argmax 1, then 2
  good, other = np.array([[9, 1, 2]]), np.array([[9, 1, 3]])
  assert parity_compare.not_greedy(good, logits, good, logits) == 0
  assert parity_compare.not_greedy(other, logits, good, logits) == 1
  assert parity_compare.not_greedy(good, logits, other, logits) == 1
  assert parity_compare.not_greedy(np.array([[8, 1, 2]]), logits, good, logits) == 1


def test_the_worst_statistic_decides():
  """Median and worst row have limits of their own."""
  theirs = {"kvquant/layer0/output": np.ones((5, 4), np.float32)}
  one_off = theirs["kvquant/layer0/output"].copy()
  one_off[3] += 0.1
  passes = parity_compare.one_layer(
    "kvquant/layer0/output", {"kvquant/layer0/output": one_off}, theirs, KVQUANT
  )
  assert passes.passed
  fails = parity_compare.one_layer(
    "kvquant/layer0/output", {"kvquant/layer0/output": one_off + 1e-3}, theirs, KVQUANT
  )
  assert not fails.passed and fails.what.startswith("median row")
  one_off[3] += 1
  fails = parity_compare.one_layer(
    "kvquant/layer0/output", {"kvquant/layer0/output": one_off}, theirs, KVQUANT
  )
  assert not fails.passed and fails.what.startswith("worst row")


@pytest.mark.parametrize("name", CASES)
def test_limits_are_those_of_the_case(name):
  suggested = about(name)["suggested_limits"]
  found = {mode: limits(about(name), mode, 0.3) for mode in parity_case.MODES}
  assert found["exact"].logits == pytest.approx(1e-5)
  by_start = lambda start: next(v for k, v in suggested.items() if k.startswith(start))  # noqa: E731
  assert found["kvquant"].logits == by_start("kvquant: logits rms")
  assert found["kvquant"].unequal == pytest.approx(0.005)
  assert found["official"].logits == by_start("official: end-to-end")
  assert found["official"].mismatch == pytest.approx(0.45)
  layer = {mode: dict(found[mode].layer) for mode in found}
  assert layer["exact"] == {"worst row": by_start("layers.npz exact: worst")}
  assert layer["kvquant"] == {
    "median row": by_start("layers.npz kvquant: median"),
    "worst row": by_start("layers.npz kvquant: worst"),
  }
  assert layer["official"] == {
    "median row": by_start("layers.npz official: median"),
    "90th percentile row": by_start("layers.npz official: 90th"),
  }


def test_a_case_without_limits_gets_ours():
  assert limits({}, "exact", None).logits == pytest.approx(1e-5)
  assert limits({}, "kvquant", None).logits == KVQUANT_RMS
  assert limits({}, "official", None).logits == OFFICIAL_RMS
  assert limits({}, "official", None).mismatch == limits({}, "official", np.inf).mismatch == 0.5


# --- Folders that are no case ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
  for name in ("case.json", "expected.npz", "layers.npz"):
    (tmp_path / name).write_bytes((GOLDEN / "tiny-text" / name).read_bytes())
  return tmp_path


def change(folder: pathlib.Path, name: str, to: np.ndarray | None) -> None:
  with np.load(folder / "expected.npz") as arrays:
    kept = {key: arrays[key] for key in arrays.files if key != name}
  np.savez(folder / "expected.npz", **kept, **({} if to is None else {name: to}))


def refused(folder: pathlib.Path) -> str:
  with pytest.raises(parity_case.CaseError) as caught:
    parity_case.read(folder)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_a_folder_that_is_no_case(tmp_path):
  assert "no such folder" in refused(tmp_path / "none")
  assert "has no case.json" in refused(tmp_path)
  (tmp_path / "case.json").write_text("{")
  assert "case.json: cannot be read" in refused(tmp_path)


def change_layers(folder: pathlib.Path, name: str, to: np.ndarray) -> None:
  with np.load(folder / "layers.npz") as arrays:
    np.savez(folder / "layers.npz", **(dict(arrays) | {name: to}))


def test_inputs_of_layers_that_are_of_no_run(folder):
  change_layers(folder, "layer1/input", np.zeros((5, 4, 256), np.uint16))
  assert "layers.npz: layer1/input has 5 positions; all inputs must have those" in refused(folder)
  change_layers(folder, "layer1/input", np.float32(3))
  assert "layers.npz: layer1/input is float32 []; must be real numbers" in refused(folder)


def test_the_run_of_the_layers_need_not_be_the_first(folder):
  """Of two equally long prompts it is the one that case.json names."""
  case = parity_case.read(folder)
  assert case.layered_run.name == "A"
  b, a = case.runs[1], case.runs[0]
  case = dataclasses.replace(case, runs=(b, a))
  assert case.layered_run.name == "A"
  twin = dataclasses.replace(a, name="A2")
  case = dataclasses.replace(case, runs=(twin, b, a))
  assert case.layered_run.name == "A"
  case = dataclasses.replace(case, about={**case.about, "files": {}})
  with pytest.raises(
    parity_case.CaseError, match="runs A2 and A have equally long prompts; `files`"
  ):
    _ = case.layered_run


@pytest.mark.parametrize("file", ["expected.npz", "layers.npz"])
def test_arrays_that_are_cut_or_flipped(folder, file):
  content = (folder / file).read_bytes()
  (folder / file).write_bytes(content[: len(content) // 2])
  assert f"{file}: cannot be read" in refused(folder)
  middle = len(content) // 2
  (folder / file).write_bytes(
    content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
  )
  assert f"{file}: cannot be read" in refused(folder)


def test_arrays_that_are_not_those_of_the_description(folder):
  change(folder, "exact/A/decode_logits", None)
  assert "lacks exact/A/decode_logits, which case.json lists" in refused(folder)
  change(folder, "exact/A/decode_logits", np.zeros((2, 2), np.float32))
  assert "exact/A/decode_logits is float32 [2, 2]; case.json says float32 [24, 2, 512]" in refused(
    folder
  )


def test_a_case_without_layers(folder):
  (folder / "layers.npz").unlink()
  assert parity_case.read(folder).layers == {}


@pytest.mark.parametrize(
  ("alter", "message"),
  [
    (lambda about, arrays: about["runs"]["A"].update(S=0), "run A: S is 0"),
    (lambda about, arrays: about.update(tolerances=None), "tolerances is None"),
    (lambda about, arrays: about.update(suggested_limits=[]), r"suggested_limits is \[\]"),
    (lambda about, arrays: about["runs"]["A"].update(n_decode=None), "lacks S or n_decode"),
    (lambda about, arrays: about["runs"].update(A=None), "lacks S or n_decode of run A"),
    (lambda about, arrays: about["runs"]["A"].update(n_decode=3), "decode_logits is .*needs"),
    (
      lambda about, arrays: arrays.update(
        {"exact/A/layer1/topk": arrays["exact/A/layer1/topk"] + np.int16(500)}
      ),
      "selects entry",
    ),
    (lambda about, arrays: arrays.update({"A/tokens": arrays["A/tokens"][0]}), "A/tokens is"),
    (
      lambda about, arrays: arrays.update(
        {"exact/A/main_hidden": arrays["exact/A/main_hidden"] * 1j}
      ),
      "must be real numbers",
    ),
  ],
)
def test_a_case_that_contradicts_itself(folder, alter, message):
  about = json.loads((folder / "case.json").read_text())
  about.pop("arrays")  # which would tell first
  with np.load(folder / "expected.npz") as stored:
    arrays = dict(stored)
  alter(about, arrays)
  (folder / "case.json").write_text(json.dumps(about))
  np.savez(folder / "expected.npz", **arrays)
  assert re.search(message, refused(folder))


def test_a_case_cannot_grant_more_than_float32_needs_in_exact_mode():
  generous = {"suggested_limits": {"exact: logits max_abs (float32 implementation)": 1e9,
                                   "layers.npz exact: worst row relative rms": 1e9}}  # fmt: skip
  assert limits(generous, "exact", None) == EXACT


@pytest.mark.parametrize("side", [0, 1])
def test_one_cached_value_that_is_not_finite_fails(side):
  name = "kvquant/A/layer1/compressed_kv"
  sides = [np.zeros((2, 40, 64), np.float32), np.zeros((2, 40, 64), np.float32)]
  sides[side][1, 3, 5] = np.nan
  ours, stored = ({name: x} for x in sides)
  assert not parity_compare.end_to_end(name, ours, stored, KVQUANT, None).passed
