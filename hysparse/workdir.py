"""What a workdir is: the folder of one experiment, known by its `experiment.json`.

    experiment.json   the whole config and the versions that wrote it
    checkpoints/      see checkpoints.py
    tokenizer.json    the tokenizer of the data, see tokenizer.py
    released/         small files of a released model that was converted, see conversion/convert.py
    metrics.jsonl     one record a step, see training/metrics.py
    tensorboard/      the same for TensorBoard
    loss.png, result.json   at the end

An experiment has one config. Going on in its workdir with another is refused, except for fields
that do not change what has been computed so far: `MAY_CHANGE`. Of these `train.steps` moves the
learning-rate curve, whose shares are shares of all steps: training on from 250 to 500 steps is not
the run that had 500 from the start.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from hysparse import json_text
from hysparse.config import Config, ConfigError

EXPERIMENT = "experiment.json"
RELEASED = "released"
RESULT = "result.json"
PLOT = "loss.png"

CONVERTED = "converted"  # in experiment.json: what a conversion has to say

MAY_CHANGE = (
  "train.steps",
  "train.log_every",
  "train.checkpoint_every",
  "train.keep_checkpoints",
  "eval.*",
)

_VERSIONS_OF = ("hysparse", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


class WorkdirError(ValueError):
  """A workdir that cannot be used: not writable, in use, of another experiment; one line."""


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
  """Makes the folder and holds it against other trainers; the lock dies with the process.

  Raises:
    WorkdirError: it cannot be written or another process holds it.
  """
  if path.exists() and not path.is_dir():
    raise WorkdirError(f"workdir {path}: is a file; must be a folder, which is made if missing")
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / ".lock").open("a+", encoding="utf-8")
  except OSError as error:
    raise WorkdirError(f"workdir {path}: cannot be written: {error.strerror}") from None
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      holder = lock.read().strip() or "unknown"
      raise WorkdirError(
        f"workdir {path}: another trainer (process {holder}) is at work in it"
      ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    yield


def versions() -> dict[str, str]:
  """Python and the packages that decide numbers and file formats."""
  found = {"python": platform.python_version()}
  for name in _VERSIONS_OF:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def read_experiment(path: pathlib.Path) -> dict[str, Any] | None:
  """The record in `experiment.json` ("config", "versions" and what the writer added), or None.

  Raises:
    WorkdirError: the file cannot be read, or there are checkpoints without it.
  """
  file = path / EXPERIMENT
  if not file.exists():
    if any((path / "checkpoints").glob("[0-9]*")):
      raise WorkdirError(f"workdir {path}: has checkpoints but no {EXPERIMENT}; not a workdir")
    return None
  try:
    record = json_text.parse(file.read_bytes())
    record["config"], record["versions"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise WorkdirError(f"{file}: cannot be read ({type(error).__name__}: {error})") from None
  return record


def write_experiment(path: pathlib.Path, config: Config, **more: Any) -> None:
  """Writes `experiment.json`, whole or not at all."""
  write_json(path / EXPERIMENT, {"config": config.to_dict(), "versions": versions(), **more})


def check_same(path: pathlib.Path, record: Mapping[str, Any], config: Config) -> None:
  """Refuses a config that differs from the recorded one in a field that may not change.

  Raises:
    WorkdirError: names each such field with its old and new value.
  """
  try:
    # Through Config, so that fields which are younger than the record count with their defaults.
    old = flatten(Config.from_dict(record["config"]).to_dict())
  except ConfigError as error:
    raise WorkdirError(f"{path / EXPERIMENT}: {error}") from None
  new = flatten(config.to_dict())
  differ = [
    f"{name} {old[name]!r} -> {new[name]!r}"
    for name in new
    if old[name] != new[name] and not any(fnmatch.fnmatch(name, p) for p in MAY_CHANGE)
  ]
  if differ:
    raise WorkdirError(
      f"workdir {path}: was started with another config: {', '.join(differ)}; take another workdir"
      " or the old values"
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested groups as one dictionary: `{"optim.lr": 0.003}`."""
  flat = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a file that is either the old one or the new one, also after a crash."""
  write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  """As `write_json`, for text."""
  temporary = path.with_name(f".{path.name}.tmp")
  with open(temporary, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
