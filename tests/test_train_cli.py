"""scripts/train.py: errors in one line, a run from config to result, kills and full disks."""

import dataclasses
import fcntl
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from hysparse import checkpoints, config_file, experiment, workdir
from hysparse.training import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train.py"

_CONFIG = '''
"""A model of a second."""

from ml_collections import ConfigDict


def get_config():
  return ConfigDict({{
    "model": {{
      "schedule": {schedule!r}, "engram_layers": {engram!r}, "vocab_size": 259, "d_model": 16,
      "n_heads": 2, "head_dim": 8, "rope_dim": 4, "q_rank": 8, "o_groups": 1, "o_rank": 8,
      "window": 4, "top_k": 2, "index_heads": 2, "index_dim": 4, "candidate_blocks": 3,
      "candidate_block_size": 2, "n_experts": 4, "experts_per_token": 2, "expert_dim": 8,
      "streams": 2, "engram_heads": 2, "engram_dim": 4, "engram_vocab": 50,
    }},
    "data": {{
      "source": {source!r}, "tokenizer": "bytes", "seq_len": 48, "batch_size": 2, "holdout": 0.2,
    }},
    "optim": {{"warmup_steps": 2}},
    "train": {{"steps": 6, "checkpoint_every": 4, "log_every": 2}},
    "eval": {{"every": 4, "batches": 2, "sample_tokens": 5}},
  }}).lock()
'''


def write_config(folder: pathlib.Path, schedule: str, engram: tuple[int, ...] = ()) -> pathlib.Path:
  """A config on a small corpus, both below `folder`."""
  corpus = folder / "corpus"
  corpus.mkdir()
  rng = random.Random(0)
  words = ["def", "return", "value", "x", "for", "in", "range", "print"]
  for i in range(40):
    (corpus / f"{i}.txt").write_text(" ".join(rng.choices(words, k=60)))
  path = folder / "config.py"
  path.write_text(_CONFIG.format(schedule=schedule, engram=engram, source=str(corpus)))
  return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  return write_config(tmp_path_factory.mktemp("small"), "swa full/1")


# --- Errors --------------------------------------------------------------------------------------

_CASES = """
import contextlib, importlib.util, io, json, sys
from absl import flags
spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
outcomes = {}
for name, argv in json.loads(sys.argv[2]).items():
  flags.FLAGS.unparse_flags()
  for flag in ("config", "workdir"):
    flags.FLAGS[flag].unparse()
  errors = io.StringIO()
  with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
    try:
      train.run(["train.py", *argv])
      code = None
    except SystemExit as stop:
      code = stop.code
  outcomes[name] = (code, errors.getvalue())
print(json.dumps(outcomes))
"""

# name -> what its error says
ERRORS = {
  "no config": "config",
  "no workdir": "workdir",
  "no such file": "config: no such file: nothing.py",
  "stray word": "stray: not understood",
  "unknown flag": "Unknown command line flag 'wrkdir'",
  "unknown field": "optim.lrr: unknown field; did you mean optim.lr?",
  "illegal value": "optim.lr: is -1.0; must be positive",
  "wrong type": "train.steps: is 'many'; must be a whole number",
  "no such data": "/nowhere",
  "vocabulary": "model.vocab_size: is 100; the tokenizer 'bytes' has 259 ids",
  "empty prompt": "eval.sample_prompt: is ''; must hold at least one token",
  "workdir is a file": "is a file; must be a folder",
  "in use": "another trainer (process 4711) is at work in it",
  "other config": "another config: model.top_k 2 -> 3, optim.lr 0.003 -> 0.5; take",
  "not a workdir": "has checkpoints but no experiment.json",
  "fewer steps": "train.steps: is 6; ",
  "broken record": "experiment.json: cannot be read",
}


@pytest.fixture(scope="module")
def outcomes(small, tmp_path_factory):
  """Runs all the command lines in one process: most of each is imports."""
  folder = tmp_path_factory.mktemp("errors")

  def place(name: str) -> pathlib.Path:
    (folder / name).mkdir()
    return folder / name

  config = config_file.load(str(small))
  (folder / "file").write_text("")
  used = place("used")
  lock = (used / ".lock").open("w")
  lock.write("4711")
  lock.flush()
  fcntl.flock(lock, fcntl.LOCK_EX)
  workdir.write_experiment(place("other"), config)
  (folder / "other" / "checkpoints" / "3").mkdir(parents=True)
  (place("bare") / "checkpoints" / "3").mkdir(parents=True)
  workdir.write_experiment(place("done"), config)
  (folder / "done" / "checkpoints" / "9").mkdir(parents=True)
  (place("broken") / "experiment.json").write_text('{"config": ')

  fresh = f"--workdir={folder / 'fresh'}"
  given = f"--config={small}"
  cases = {
    "no config": [fresh],
    "no workdir": [given],
    "no such file": ["--config=nothing.py", fresh],
    "stray word": [given, fresh, "stray"],
    "unknown flag": [given, fresh, "--wrkdir=x"],
    "unknown field": [given, fresh, "--config.optim.lrr=1"],
    "illegal value": [given, fresh, "--config.optim.lr=-1"],
    "wrong type": [given, fresh, "--config.train.steps=many"],
    "no such data": [given, fresh, "--config.data.source=/nowhere"],
    "vocabulary": [given, fresh, "--config.model.vocab_size=100"],
    "empty prompt": [given, fresh, "--config.eval.sample_prompt="],
    "workdir is a file": [given, f"--workdir={folder / 'file'}"],
    "in use": [given, f"--workdir={used}"],
    "other config": [
      given, f"--workdir={folder / 'other'}", "--config.optim.lr=0.5", "--config.model.top_k=3",
      "--config.eval.every=3", "--config.train.steps=9",  # these two may change
    ],
    "not a workdir": [given, f"--workdir={folder / 'bare'}"],
    "fewer steps": [given, f"--workdir={folder / 'done'}"],
    "broken record": [given, f"--workdir={folder / 'broken'}"],
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-c", _CASES, str(SCRIPT), json.dumps(cases)],
    capture_output=True,
    text=True,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line_and_status_2(outcomes, case):
  code, errors = outcomes[case]
  assert code == 2, errors
  assert errors.startswith("error: ") and errors.count("\n") == 1
  assert ERRORS[case] in errors


# --- A run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
  """(workdir, result) of the small config."""
  place = tmp_path_factory.mktemp("trained")
  return place, experiment.run(config_file.load(str(small)), place)


def test_a_run_leaves_its_result(small, trained, capsys):
  place, result = trained
  assert result.step == 6 and set(result.baselines) == {"unigram", "bigram"}
  assert 0 < result.heldout["bits_per_byte"] < 20
  assert (place / workdir.PLOT).read_bytes().startswith(b"\x89PNG")
  assert (place / "tokenizer.json").exists()
  assert json.loads((place / workdir.RESULT).read_text()) == dataclasses.asdict(result)
  assert [r["step"] for r in metrics.read(place) if "eval" in r] == [4, 6]
  assert checkpoints.steps_in(place) == [4, 6]
  again = experiment.run(config_file.load(str(small)), place)
  said = capsys.readouterr().out
  assert again == result and "has finished its 6 steps" in said and "compiled" not in said
  assert f"{result.heldout['bits_per_byte']:.3f}" in said


def test_changed_data_is_refused_and_nothing_overwritten(small, trained):
  place, _ = trained
  before = {p: p.read_bytes() for p in place.iterdir() if p.is_file() and p.name != ".lock"}
  new = small.parent / "corpus" / "new.txt"
  new.write_text("more text")
  try:
    with pytest.raises(experiment.USER_ERRORS, match="data position: was saved with documents"):
      experiment.run(config_file.load(str(small), ["train.steps=8"]), place)
  finally:
    new.unlink()
  after = {p: p.read_bytes() for p in place.iterdir() if p.is_file() and p.name != ".lock"}
  assert after == before


@pytest.mark.slow
def test_more_steps_go_on(small, trained, tmp_path, capsys):
  place = shutil.copytree(trained[0], tmp_path / "more")
  last = experiment.run(config_file.load(str(small), ["train.steps=8"]), place)
  said = capsys.readouterr().out
  assert "going on from checkpoint 6" in said
  assert "runs/*/attn/wq_b/weight" in said and "held out: " in said
  assert last.step == 8
  steps = [r["step"] for r in metrics.read(place) if "loss" in r]
  assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
  assert workdir.read_experiment(place)["config"]["train"]["steps"] == 8


# --- Processes -----------------------------------------------------------------------------------


def start(
  config: pathlib.Path, place: pathlib.Path, *overrides: str, cache: pathlib.Path | None = None
) -> subprocess.Popen:
  """Starts scripts/train.py; `cache` keeps what it compiles for the next time."""
  variables = {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return subprocess.Popen(
    [sys.executable, str(SCRIPT), f"--config={config}", f"--workdir={place}", *overrides],
    env=os.environ | (variables if cache else {}),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def wait_for_step(process: subprocess.Popen, place: pathlib.Path, step: int) -> bool:
  """Until metrics.jsonl has this step; False if the process ends before."""
  while process.poll() is None:
    if any(record["step"] >= step for record in metrics.read(place)):
      return True
    time.sleep(0.02)
  return False


def sequence(place: pathlib.Path) -> list[dict]:
  """The records without what depends on the clock."""
  return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in metrics.read(place)]


def final_digests(place: pathlib.Path) -> dict:
  """Of every array and of the data position at the last step, from the checkpoint itself."""
  last = place / checkpoints.FOLDER / str(max(checkpoints.steps_in(place)))
  return json.loads((last / "position" / "metadata").read_text())


@pytest.mark.slow
def test_killed_at_random_moments_equals_uninterrupted_to_the_bit(tmp_path):
  """SIGKILL between and inside steps, evaluations and checkpoint writes; SIGTERM once."""
  schedule = "swa full/2 reuse | full/1+candidates reindex"
  config = write_config(tmp_path, schedule, engram=(1,))
  overrides = [
    "--config.train.steps=40", "--config.train.checkpoint_every=3", "--config.train.log_every=1",
    "--config.eval.every=7",
  ]  # fmt: skip
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  process = start(config, whole, *overrides)
  output = process.communicate()[0]
  assert process.returncode == 0, output

  rng = random.Random(1)
  kills = []
  for target in (1, 9, 19, 24, 33):
    process = start(config, killed, *overrides, cache=tmp_path / "cache")
    assert wait_for_step(process, killed, target), process.communicate()[0]
    time.sleep(rng.uniform(0, 0.3))
    number = signal.SIGTERM if target == 19 else signal.SIGKILL
    process.send_signal(number)
    output = process.communicate()[0]
    kills.append((target, process.returncode))
    if number == signal.SIGTERM:
      assert process.returncode == 0 and "SIGTERM: stopped after step" in output
  assert [code for _, code in kills].count(-signal.SIGKILL) == 4, kills
  process = start(config, killed, *overrides, cache=tmp_path / "cache")
  output = process.communicate()[0]
  assert process.returncode == 0 and "going on from checkpoint" in output, output
  assert sequence(killed) == sequence(whole)
  assert final_digests(killed) == final_digests(whole)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_afterwards(small, tmp_path):
  place = tmp_path / "run"
  limited = textwrap.dedent("""
    import resource, runpy, sys
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
  """)
  command = [str(SCRIPT), f"--config={small}", f"--workdir={place}"]
  full = subprocess.run(
    [sys.executable, "-c", limited, *command], capture_output=True, text=True, check=False
  )
  assert full.returncode == 2, full.stderr
  assert full.stderr.count("error: ") == 1 and "cannot be written" in full.stderr
  assert "Traceback" not in full.stderr
  process = start(small, place)
  output = process.communicate()[0]
  assert process.returncode == 0 and "6 steps" in output, output
