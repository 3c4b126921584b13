"""Stopped or killed anywhere and started again, a run is the uninterrupted one to the bit."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from training_fakes import Run, SignallingData, arrays, config, records

from hysparse import checkpoints

SETTINGS = {"steps": 11, "checkpoint_every": 4, "log_every": 3}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("uninterrupted")
  run = Run(workdir, config(train=SETTINGS, eval={"every": 5}))
  assert run()
  return records(workdir), arrays(run.loop.state)


def assert_same(workdir, run, uninterrupted):
  expected_records, expected_state = uninterrupted
  assert records(workdir) == expected_records
  state = arrays(run.loop.state)
  assert state.keys() == expected_state.keys()
  for name, values in expected_state.items():
    assert values.dtype == state[name].dtype
    np.testing.assert_array_equal(state[name], values, err_msg=name)


# The first step, before and at a checkpoint, at an evaluation, at the last step.
@pytest.mark.parametrize("stops", [[1], [3], [4], [5], [2, 7, 9], [11]])
def test_stopped_and_gone_on(tmp_path, uninterrupted, stops):
  for stop in stops:
    first = Run(
      tmp_path, config(train=SETTINGS, eval={"every": 5}), SignallingData(stop, signal.SIGTERM)
    )
    assert first() is False
    assert first.checkpoints.latest == stop
  last = Run(tmp_path, config(train=SETTINGS, eval={"every": 5}))
  assert last.first == stops[-1]
  assert last() and last.ended == [11]
  assert_same(tmp_path, last, uninterrupted)


def test_gone_on_from_an_older_checkpoint(tmp_path, uninterrupted):
  """Work behind the restored step is done again and its records replaced."""
  settings = config(train={**SETTINGS, "keep_checkpoints": 9}, eval={"every": 5})
  Run(tmp_path, settings, SignallingData(10, signal.SIGTERM))()
  (tmp_path / checkpoints.FOLDER / "10" / "position" / "metadata").unlink()
  last = Run(tmp_path, settings)
  assert last.first == 8 and "checkpoint 10 cannot be read" in last.told.getvalue()
  last()
  assert_same(tmp_path, last, uninterrupted)


def test_a_finished_run_computes_no_step(tmp_path, uninterrupted):
  Run(tmp_path, config(train=SETTINGS, eval={"every": 5}))()
  again = Run(tmp_path, config(train=SETTINGS, eval={"every": 5}))
  assert again() and again.evaluated == [11] and again.data.get_state() == {"index": 11}
  assert_same(tmp_path, again, uninterrupted)


_CHILD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from test_resume import SETTINGS
from training_fakes import Run, SignallingData, config
data = SignallingData(int(sys.argv[3]), 9)
Run(pathlib.Path(sys.argv[2]), config(train=SETTINGS, eval={"every": 5}), data)()
"""


@pytest.mark.parametrize("kill", [9, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_and_gone_on(tmp_path, uninterrupted, kill):
  """SIGKILL, with a checkpoint being written in the background and losses not yet read."""
  child = subprocess.run(
    [sys.executable, "-c", _CHILD, os.path.dirname(__file__), str(tmp_path), str(kill)],
    capture_output=True,
    check=False,
  )
  assert child.returncode == -signal.SIGKILL, child.stderr.decode()
  last = Run(tmp_path, config(train=SETTINGS, eval={"every": 5}))
  assert last.first in (0, 4, 8)
  last()
  assert_same(tmp_path, last, uninterrupted)
