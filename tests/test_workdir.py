"""What a workdir records, which changes it allows, and its lock."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
from training_fakes import config

from hysparse import workdir
from hysparse.workdir import WorkdirError


def replaced(settings, name: str, value):
  group, field = name.split(".")
  part = dataclasses.replace(getattr(settings, group), **{field: value})
  return dataclasses.replace(settings, **{group: part})


MAY_CHANGE = {
  "train.steps": 99,
  "train.log_every": 1,
  "train.checkpoint_every": 7,
  "train.keep_checkpoints": 5,
  "eval.every": 3,
  "eval.batches": 1,
  "eval.sample_prompt": "x",
}
MAY_NOT = {
  "model.window": 8,
  "data.seed": 5,
  "data.batch_size": 4,
  "optim.lr": 0.5,
  "train.seed": 3,
  "train.balance_rate": 0.5,
  "train.compute_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", [*MAY_CHANGE, *MAY_NOT])
def test_which_fields_may_change(tmp_path, name):
  old = config()
  workdir.write_experiment(tmp_path, old)
  record = workdir.read_experiment(tmp_path)
  value = (MAY_CHANGE | MAY_NOT)[name]
  new = replaced(old, name, value)
  workdir.check_same(tmp_path, record, old)
  if name in MAY_CHANGE:
    workdir.check_same(tmp_path, record, new)
    return
  was = workdir.flatten(old.to_dict())[name]
  with pytest.raises(WorkdirError) as caught:
    workdir.check_same(tmp_path, record, new)
  assert f"config: {name} {was!r} -> {value!r}; " in str(caught.value)


def test_a_record_older_than_a_field_counts_with_its_default(tmp_path):
  settings = config()
  workdir.write_experiment(tmp_path, settings)
  record = json.loads((tmp_path / workdir.EXPERIMENT).read_text())
  del record["config"]["optim"]["clip_norm"]
  workdir.check_same(tmp_path, record, settings)
  with pytest.raises(WorkdirError, match=r"optim\.clip_norm 1\.0 -> 2\.0"):
    workdir.check_same(tmp_path, record, replaced(settings, "optim.clip_norm", 2.0))
  record["config"]["optim"]["gone"] = 1
  with pytest.raises(WorkdirError, match=r"experiment\.json: optim\.gone: unknown field"):
    workdir.check_same(tmp_path, record, settings)


def test_versions_are_recorded(tmp_path):
  workdir.write_experiment(tmp_path, config())
  assert {"python", "jax", "flax"} <= set(workdir.read_experiment(tmp_path)["versions"])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
  path = tmp_path / "file.json"
  workdir.write_json(path, {"a": 1})
  with pytest.raises(TypeError):
    workdir.write_json(path, {"a": object()})
  with pytest.raises(UnicodeEncodeError):
    workdir.write_text(path, "half\ud800")
  assert json.loads(path.read_text()) == {"a": 1}


_HOLD = """
import pathlib, sys
from hysparse import workdir
with workdir.locked(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  sys.stdin.read()
"""


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path):
  place = tmp_path / "new" / "run"
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLD, str(place)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert holder.stdout.readline() == "held\n"
  with pytest.raises(WorkdirError, match=rf"another trainer \(process {holder.pid}\)"):  # noqa: SIM117
    with workdir.locked(place):
      pass
  os.kill(holder.pid, signal.SIGKILL)
  holder.communicate()
  with workdir.locked(place):
    assert (place / ".lock").read_text() == f"{os.getpid()}\n"
