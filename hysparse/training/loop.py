"""The loop: batches in, records and checkpoints out, until done, told to stop, or not finite.

The host runs a few steps ahead of the device and reads each step's loss when it is there, so the
device never waits. What must not run ahead waits: evaluations and checkpoints first read everything
that is pending, so a checkpoint is only ever written of a state known to be finite.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from hysparse.checkpoints import Checkpoints
from hysparse.training import state as state_lib
from hysparse.training.metrics import Metrics
from hysparse.training.progress import Console, Stopwatch, duration
from hysparse.training.state import Trainer, TrainState

# Enough for the device to find its next step waiting; each costs one batch of host memory.
_RUN_AHEAD = 2


class NonFiniteError(ArithmeticError):
  """A loss, gradient or parameter that is not finite; names the step and the saved batch."""


class BatchIterator(Protocol):
  """The training data of training/data: endless, and able to say and take its position."""

  def __next__(self) -> dict[str, np.ndarray]: ...
  def get_state(self) -> dict[str, Any]: ...
  def set_state(self, state: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Callbacks:
  """What the loop calls without knowing it.

  Attributes:
    evaluate: state -> metrics by name, every `eval.every` steps and at the end.
    at_end: state after the last step; sample, plot and summary.
  """

  evaluate: Callable[[TrainState], Mapping[str, float]]
  at_end: Callable[[TrainState], None]


class StopSignal:
  """Within this context SIGTERM and SIGINT ask for a stop; a second SIGINT interrupts at once."""

  def __init__(self):
    self.name: str | None = None  # of the signal received

  def __enter__(self) -> StopSignal:
    self._old = {}
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
      for number in (signal.SIGTERM, signal.SIGINT):
        self._old[number] = signal.signal(number, self._receive)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._old.items():
      signal.signal(number, handler)

  def _receive(self, number: int, _: object) -> None:
    self.name = signal.Signals(number).name
    print(f"{self.name}: stopping after this step; Ctrl-C stops at once", file=sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclasses.dataclass
class Loop:
  """One run of training, from `state` to `config.train.steps` or a stop.

  Attributes:
    trainer: the step.
    state: where to start; donated to the step, afterwards the state reached.
    data: positioned behind the batches that `state` has seen.
    workdir: where the batch of a failed step goes.
    metrics, checkpoints, console: where results go.
  """

  trainer: Trainer
  state: TrainState
  data: BatchIterator
  workdir: pathlib.Path
  metrics: Metrics
  checkpoints: Checkpoints
  console: Console
  callbacks: Callbacks

  def __post_init__(self):
    self._config = self.trainer.config
    self._step = int(self.state.step)
    self._pending: collections.deque = collections.deque()
    self._watch = Stopwatch()
    self._began = self._step
    self._logged = (self._step, 0.0)  # step and training seconds of the last log record
    self._tokens = 0  # valid tokens of the steps read since then

  def run(self) -> bool:
    """Trains; True when all steps are done, False when a signal ended it before.

    Raises:
      NonFiniteError: nothing of the step was applied, its batch is saved.
      CheckpointError: a checkpoint could not be written.
    """
    total, saved = self._config.train.steps, self.checkpoints.latest
    with StopSignal() as stop:
      while stop.name is None:
        if self._due(self._config.eval.every):
          self._evaluate()
        if self._step == total:
          self.callbacks.at_end(self.state)
          return True
        self._advance()
        if self._due(self._config.train.checkpoint_every):
          saved = self._save()
      if saved != self._step:
        self._save()
      self.checkpoints.wait()
      self.console.say(
        f"{stop.name}: stopped after step {self._step}, which is saved; the same command goes on"
      )
    return False

  def _due(self, every: int) -> bool:
    return self._step > 0 and (self._step % every == 0 or self._step == self._config.train.steps)

  def _advance(self) -> None:
    """Starts the next step and reads one that lies back."""
    batch = next(self.data)
    began = time.perf_counter()
    if not self._watch.running:
      self.console.say("compiling the step")
    self.state, values = self.trainer.compiled(self.state, batch)
    self._step += 1
    if not self._watch.running:
      self.console.say(f"compiled the step in {duration(time.perf_counter() - began)}")
      self._watch.start()
    self._pending.append((self._step, batch, values))
    if len(self._pending) > _RUN_AHEAD:
      self._read()

  def _read(self) -> None:
    """Waits for the oldest pending step and records it."""
    step, batch, values = self._pending.popleft()
    logged = step % self._config.train.log_every == 0 or step == self._config.train.steps
    if not logged:
      values = {name: values[name] for name in ("loss", "grad_norm", "bad_step")}
    values = {name: value.item() for name, value in jax.device_get(values).items()}
    loss, bad_step = values.pop("loss"), values.pop("bad_step")
    if bad_step:
      self._refuse(step, batch, f"the loss is {loss}, the gradient norm {values['grad_norm']}")
    self._tokens += int(batch["valid"].sum())
    if logged:
      self._log(step, loss, values)
    else:
      self.metrics.step(step, loss)

  def _log(self, step: int, loss: float, values: dict[str, float]) -> None:
    seconds = self._watch.seconds
    rate = self._tokens / max(seconds - self._logged[1], 1e-9)
    self._logged, self._tokens = (step, seconds), 0
    self.metrics.step(step, loss, {**values, "tokens_per_s": rate})
    total = self._config.train.steps
    # From the mean step of this run: one interval says little when steps are short.
    left = duration((total - step) * seconds / (step - self._began))
    self.console.progress(f"step {step}/{total}  loss {loss:.4f}  {rate:,.0f} tokens/s  ETA {left}")

  def _settle(self) -> None:
    """Reads everything pending."""
    while self._pending:
      self._read()

  def _evaluate(self) -> None:
    self._settle()
    with self._watch.paused():
      values = self.callbacks.evaluate(self.state)
      self.metrics.evaluation(self._step, values)

  def _save(self) -> int:
    self._settle()
    with self._watch.paused():
      if not state_lib.all_finite(self.state.params):
        raise NonFiniteError(f"step {self._step}: a parameter is not finite; not saved")
      self.metrics.sync()
      self.checkpoints.save(self._step, self.state, self.data.get_state())
    return self._step

  def _refuse(self, step: int, batch: Mapping[str, np.ndarray], why: str) -> None:
    path = self.workdir / f"nonfinite_step_{step}.npz"
    np.savez(path, step=step, **batch)
    self.metrics.sync()
    saved = self.checkpoints.latest
    last = "there is no checkpoint" if saved is None else f"the last checkpoint is step {saved}"
    raise NonFiniteError(
      f"step {step}: {why}; nothing of it was applied, its batch is in {path}; {last}"
    )
