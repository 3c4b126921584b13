"""What a run records: `metrics.jsonl` and TensorBoard, one clean sequence over all restarts.

    {"step": 7, "loss": 6.1}                                every step
    {"step": 10, "loss": 5.9, "lr": 0.003, ...}             every `train.log_every` steps
    {"step": 100, "eval": {"bits_per_byte": 2.9, ...}}      every `eval.every` steps

Steps count the updates applied: the loss of step n is computed with the parameters before its
update and the evaluation at step n with those after it. Losses are float32 printed as float64,
so equal text is equal bits.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorboardX

from hysparse import json_text
from hysparse import workdir as workdir_lib

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Metrics:
  """Appends records; `sync` puts them on the disk."""

  def __init__(self, workdir: pathlib.Path, step: int):
    """Goes on after `step`: later records, and the evaluation at it, are dropped.

    They belong to work that is done again (the evaluation too, so that it need not be known
    whether it had finished).
    """
    self._path = workdir / FILE
    kept = [json.dumps(record) + "\n" for record in read(workdir) if _stays(record, step)]
    workdir_lib.write_text(self._path, "".join(kept))
    self._file = self._path.open("a", encoding="utf-8")
    self._board = tensorboardX.SummaryWriter(str(workdir / TENSORBOARD), purge_step=step + 1)

  def step(self, step: int, loss: float, more: Mapping[str, float] | None = None) -> None:
    """Records one step; `more` at log steps."""
    self._write({"step": step, "loss": loss, **_finite(more or {})})
    if more is not None:
      self._draw("train", {"loss": loss, **more}, step)
      self._file.flush()  # for whoever reads along

  def evaluation(self, step: int, values: Mapping[str, float]) -> None:
    """Records the evaluation after `step` updates."""
    self._write({"step": step, "eval": _finite(values)})
    self._draw("eval", values, step)
    self._file.flush()

  def sync(self) -> None:
    """Before a checkpoint, so that the records never fall behind it."""
    self._file.flush()
    os.fsync(self._file.fileno())
    self._board.flush()

  def close(self) -> None:
    self.sync()
    self._file.close()
    self._board.close()

  def _write(self, record: Mapping[str, Any]) -> None:
    self._file.write(json.dumps(record) + "\n")

  def _draw(self, group: str, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
      self._board.add_scalar(f"{group}/{name}", value, step)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
  # JSON has no NaN; a metric without a value (nothing to average over) is null.
  return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The records of a workdir in order, up to the first that a crash cut short."""
  path = workdir / FILE
  if not path.exists():
    return
  with open(path, encoding="utf-8", errors="replace") as file:
    for line in file:
      try:
        yield json_text.parse(line)
      except ValueError:
        return


def _stays(record: Mapping[str, Any], step: int) -> bool:
  return record["step"] <= step - ("eval" in record)
