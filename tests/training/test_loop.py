"""The loop on a small model: records, evaluations, checkpoints, stops, refused steps."""

import functools
import io
import json
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_fakes as fakes
from training_fakes import FakeData, Run, SignallingData, arrays, config, records

from hysparse import checkpoints
from hysparse.config import Config
from hysparse.training import loop, metrics, progress
from hysparse.training import state as state_lib


def test_records_every_step_and_more_at_log_steps(tmp_path):
  run = Run(tmp_path, config(train={"steps": 8, "log_every": 3}, eval={"every": 3}))
  assert run() is True
  lines = [json.loads(line) for line in (tmp_path / metrics.FILE).read_text().splitlines()]
  steps = [r for r in lines if "loss" in r]
  assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
  full = {"step", "loss", "grad_norm", "lr", "load_peak", "perplexity", "tokens_per_s"}
  for record in steps:
    logged = record["step"] in (3, 6, 8)
    assert set(record) == (full if logged else {"step", "loss"})
  assert [r["step"] for r in lines if "eval" in r] == run.evaluated == [3, 6, 8]
  # An evaluation stands behind the losses it follows.
  assert [("eval" in r, r["step"]) for r in lines[2:5]] == [(False, 3), (True, 3), (False, 4)]
  assert run.ended == [8]
  assert list((tmp_path / metrics.TENSORBOARD).iterdir())


def test_checkpoints_when_due_and_at_the_end(tmp_path):
  Run(tmp_path, config(train={"steps": 8, "checkpoint_every": 3, "keep_checkpoints": 9}))()
  assert checkpoints.steps_in(tmp_path) == [3, 6, 8]


def test_losses_fall_and_every_part_of_the_state_moves(tmp_path):
  run = Run(tmp_path, config(train={"steps": 60}, optim={"warmup_steps": 5, "lr": 0.03}))
  before = arrays(run.loop.state)
  run()
  after = arrays(run.loop.state)
  still = {name for name in before if np.array_equal(before[name], after[name])}
  still -= {name for name in still if "'norm/weight'" in name}  # without gradient, only decayed
  assert still == {".buffers['token_map/map']", ".bad_step"}
  losses = [r["loss"] for r in records(tmp_path) if "loss" in r]
  assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_balance_moves_each_bias_against_its_load():
  rng = np.random.default_rng(0)
  load = rng.integers(0, 9, (3, 4)).astype(np.float32)
  buffers = {
    "runs/10/ffn/gate/bias": jnp.zeros((1, 4)),
    "runs/2/ffn/gate/bias": jnp.ones((2, 4)),
    "token_map/map": jnp.arange(4),
  }
  moved = state_lib.balance(buffers, jnp.asarray(load), 0.25)
  gap = np.sign(load.mean(-1, keepdims=True) - load) * 0.25
  # Run 2 comes before run 10: layers are counted in order of runs, not of their spelling.
  np.testing.assert_array_equal(moved["runs/2/ffn/gate/bias"], 1 + gap[:2])
  np.testing.assert_array_equal(moved["runs/10/ffn/gate/bias"], gap[2:])
  np.testing.assert_array_equal(moved["token_map/map"], np.arange(4))


def test_balance_moves_the_bias_of_images_by_their_load_alone():
  rng = np.random.default_rng(0)
  load = rng.integers(0, 9, (3, 2, 4)).astype(np.float32)
  load[2, 1] = 0  # a layer that saw no image
  buffers = {
    "runs/1/ffn/gate/bias_image": jnp.zeros((2, 4)),
    "runs/1/ffn/gate/bias": jnp.zeros((2, 4)),
    "runs/0/ffn/gate/bias": jnp.zeros((1, 4)),
    "runs/0/ffn/gate/bias_image": jnp.zeros((1, 4)),
    "drafts/layers/ffn/gate/bias": jnp.zeros((2, 4)),
  }
  moved = state_lib.balance(buffers, jnp.asarray(load), 0.25)
  gap = np.sign(load.mean(-1, keepdims=True) - load) * 0.25
  for kind, name in enumerate(("bias", "bias_image")):
    np.testing.assert_array_equal(moved[f"runs/0/ffn/gate/{name}"], gap[:1, kind])
    np.testing.assert_array_equal(moved[f"runs/1/ffn/gate/{name}"], gap[1:, kind])
  np.testing.assert_array_equal(moved["runs/1/ffn/gate/bias_image"][1], 0)
  np.testing.assert_array_equal(moved["drafts/layers/ffn/gate/bias"], 0)
  assert (gap[:, 0] != gap[:, 1]).any()


def test_balance_evens_the_load_out():
  """Fixed scores that favour one expert: its bias falls until all are chosen about equally."""
  scores = np.random.default_rng(0).uniform(0, 1, (400, 4))
  scores += [0.6, 0.2, 0.0, 0.0]
  buffers = {"runs/0/ffn/gate/bias": jnp.zeros((1, 4))}
  peaks = []
  for _ in range(80):
    chosen = np.argmax(scores + np.asarray(buffers["runs/0/ffn/gate/bias"][0]), axis=-1)
    load = np.bincount(chosen, minlength=4).astype(np.float32)
    peaks.append(load.max() / load.mean())
    buffers = state_lib.balance(buffers, jnp.asarray(load[None]), 0.01)
  assert peaks[0] > 2 and peaks[-1] < 1.2


@functools.cache
def states(settings: Config, count: int) -> list[dict[str, np.ndarray]]:
  """The states after 0, 1, ..., `count` steps, without the loop."""
  graphdef, shapes = fakes.abstract(settings)
  trainer = state_lib.Trainer(settings, graphdef, shapes, fakes.loss_fn)
  state, data = trainer.init(fakes.create(settings, settings.train.seed)[1]), FakeData()
  step, found = jax.jit(trainer.step), []
  for _ in range(count):
    found.append(arrays(state))
    state, _ = step(state, next(data))
  return [*found, arrays(state)]


# Before anything else was read, between, at a checkpoint, behind the last evaluation, at the end.
@pytest.mark.parametrize("bad", [1, 5, 6, 8])
def test_a_step_that_is_not_finite_stops_with_its_batch_and_changes_nothing(tmp_path, bad):
  settings = config(train={"steps": 8, "checkpoint_every": 3})
  run = Run(tmp_path, settings, FakeData(faulty=(bad - 1,)))
  with pytest.raises(loop.NonFiniteError) as caught:
    run()
  message, saved = str(caught.value), tmp_path / f"nonfinite_step_{bad}.npz"
  assert message.startswith(f"step {bad}: the loss is nan") and "\n" not in message
  assert str(saved) in message
  data = FakeData(faulty=(bad - 1,))
  data.set_state({"index": bad - 1})
  batch = next(data)
  with np.load(saved) as stored:
    assert int(stored["step"]) == bad
    assert set(stored) == {"step", *batch}
    for name, values in batch.items():
      np.testing.assert_array_equal(stored[name], values)
  assert checkpoints.steps_in(tmp_path) == [step for step in (3, 6) if step < bad]
  assert [r["step"] for r in records(tmp_path) if "loss" in r] == list(range(1, bad))
  expected, state = dict(states(settings, 8)[bad - 1]), arrays(run.loop.state)
  assert (state.pop(".bad_step"), expected.pop(".bad_step")) == (bad, 0)
  for name, values in expected.items():
    np.testing.assert_array_equal(state[name], values, err_msg=name)


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path):
  """Even one that no loss shows."""
  run = Run(tmp_path, config())
  run.loop.state.params["norm/weight"] = jnp.full((fakes.D,), jnp.inf)
  with pytest.raises(loop.NonFiniteError, match="step 3: a parameter is not finite"):
    run()
  assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
  assert checkpoints.steps_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_stops(tmp_path, number):
  handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
  run = Run(tmp_path, config(train={"steps": 8, "checkpoint_every": 3}), SignallingData(5, number))
  assert run() is False
  assert checkpoints.steps_in(tmp_path) == [3, 5]
  assert f"{signal.Signals(number).name}: stopped after step 5" in run.told.getvalue()
  assert not run.ended
  assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_second_interrupt_stops_at_once(tmp_path):
  run = Run(tmp_path, config(), SignallingData(5, signal.SIGINT, signal.SIGINT))
  with pytest.raises(KeyboardInterrupt):
    run()
  assert checkpoints.steps_in(tmp_path) == [3]


def test_a_failed_checkpoint_stops_the_run(tmp_path, monkeypatch):
  run = Run(tmp_path, config(train={"steps": 8, "checkpoint_every": 3}))

  def refuse(step, args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(run.checkpoints._manager, "save", refuse)
  with pytest.raises(checkpoints.CheckpointError, match=r"cannot be written: .*No space left"):
    run()


def test_metrics_go_on_as_one_sequence(tmp_path):
  first = metrics.Metrics(tmp_path, 0)
  for step in range(1, 6):
    first.step(step, step / 3, {"lr": 0.1, "empty": float("nan")} if step % 2 else None)
    first.evaluation(step, {"norm": 1.0})
  first.close()
  with (tmp_path / metrics.FILE).open("a") as file:
    file.write('{"step": 6, "lo')  # a kill in the middle of a line
  second = metrics.Metrics(tmp_path, 3)
  second.evaluation(3, {"norm": 2.0})
  second.step(4, 9.0)
  second.close()
  found = list(metrics.read(tmp_path))
  order = [(r["step"], "eval" in r) for r in found]
  assert order == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True), (4, False)]
  assert found[0] == {"step": 1, "loss": 1 / 3, "lr": 0.1, "empty": None}
  assert (found[5]["eval"], found[6]["loss"]) == ({"norm": 2.0}, 9.0)


def test_stopwatch_stands_still_while_paused():
  watch = progress.Stopwatch()
  with watch.paused():
    assert not watch.running
  assert watch.seconds == 0 and not watch.running
  watch.start()
  with watch.paused():
    before = watch.seconds
    time.sleep(0.01)
    assert watch.seconds == before > 0
  assert watch.running
  time.sleep(0.001)
  assert watch.seconds > before


def test_progress_line_is_rewritten_on_a_terminal_and_plain_in_a_file():
  def shown(stream):
    console = progress.Console(stream)
    console.progress("step 1 long")
    console.progress("step 2")
    console.say("done")
    return stream.getvalue()

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  assert shown(io.StringIO()) == "step 1 long\nstep 2\ndone\n"
  lines = shown(Terminal()).split("\r")
  assert [line.strip() for line in lines if line.strip()] == ["step 1 long", "step 2", "done"]
  # What a longer line left is blanked before the shorter one is written.
  assert lines[1] == " " * len("step 1 long")


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3725, "1:02:05"), (-1, "0 s")]
)
def test_duration(seconds, text):
  assert progress.duration(seconds) == text
