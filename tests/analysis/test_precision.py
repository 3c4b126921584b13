"""The precision dial on latents: errors inside the formats' steps, bytes of the closed form."""

import pathlib

import numpy as np
import pytest
from test_selected import made, prompt
from test_table import entry

import hysparse
from hysparse import analysis
from hysparse.config import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
TRAINED = ROOT / "tests" / "golden" / "trained"
# Half a step at most: E4M3 has 3 bits behind the first, BF16 7; and what E8M0 scales lose.
HALF_STEP = {"f32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4}


@pytest.fixture(scope="module")
def measured():
  return analysis.dial(made("candidate_blocks=6"), prompt())


@pytest.mark.slow
def test_errors_are_inside_the_steps(measured):
  points = {(p.component, p.format): p for p in measured.points}
  assert len(points) == 15
  for component in ("main_kv", "index_k", "window_kv"):
    for format, bound in HALF_STEP.items():
      assert points[component, format].error <= bound
    ordered = [points[component, f].error for f in ("f32", "bf16", "fp8", "fp4", "mxfp4")]
    assert ordered == sorted(ordered) and ordered[-1] < 0.25
    assert points[component, "f32"].effect == 0
    assert points[component, "bf16"].effect <= points[component, "mxfp4"].effect
    assert points[component, "mxfp4"].effect > 0


@pytest.mark.slow
def test_bytes_and_the_released_choice(measured):
  for point in measured.points:
    assert point.bytes == entry(point.format, 16)
  released = {p.component: p.format for p in measured.points if p.released}
  assert released == {"main_kv": "fp4", "index_k": "mxfp4", "window_kv": "fp8"}


@pytest.mark.slow
def test_it_shows_itself(measured):
  assert len(measured.frame) == 15 and "mxfp4" in str(measured)
  assert measured.plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_components_that_a_schedule_lacks():
  found = analysis.dial(made("schedule='swa*2'", "engram_layers=()"), prompt(20), ["fp8"])
  assert [p.component for p in found.points] == ["window_kv"]


@pytest.mark.slow
def test_dense_layers_attend_to_their_entries():
  found = analysis.dial(made("schedule='dense/2 swa'", "engram_layers=()"), prompt(20), ["fp8"])
  main_kv, window_kv = sorted(found.points, key=lambda p: p.component)
  assert (main_kv.component, window_kv.component) == ("main_kv", "window_kv")
  assert main_kv.effect > 0 and window_kv.effect > 0


@pytest.mark.slow
def test_padding_is_not_measured():
  # One token makes no entry of two; it is padded to many that would.
  found = analysis.dial(made("schedule='full/2 reuse'", "engram_layers=()"), [1], ["fp8"])
  errors = {p.component: p.error for p in found.points}
  assert np.isnan(errors["main_kv"]) and np.isnan(errors["index_k"])
  assert 0 < errors["window_kv"] <= HALF_STEP["fp8"]


def test_what_is_refused():
  path = str(ROOT / "configs" / "tiny.py")  # refused before the model is looked at
  rounded = hysparse.load_config(path, ["train.numerics='kvquant'"])
  with pytest.raises(ConfigError, match="numerics: is 'kvquant'"):
    analysis.dial((rounded, None, None), prompt())
  with pytest.raises(ConfigError, match="formats: has 'fp5'"):
    analysis.dial((hysparse.load_config(path), None, None), prompt(), ["fp5"])


@pytest.mark.slow
def test_predictions_move_with_the_dial():
  dials = {
    "none": {"main_kv": "f32", "index_k": "f32", "window_kv": "f32"},
    "released": {},
  }
  changes = analysis.logit_change(TRAINED, prompt(300, 1024), dials)
  assert changes["none"].kl == pytest.approx(0, abs=1e-6) and changes["none"].same == 1
  assert 0 < changes["released"].kl < 0.1 and changes["released"].same > 0.8
  assert changes["released"].per_token == analysis.footprint(TRAINED).per_token
  assert np.isfinite(changes["released"].kl)
