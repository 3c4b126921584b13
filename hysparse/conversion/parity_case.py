"""A parity case on disk: a released folder together with what the published code computed for it.

Beside config.json and the shards lie

    case.json       runs, modes, limits, and the shape and dtype of every array of expected.npz
    expected.npz    end-to-end arrays, named {mode}/{run}/{what} (or without a mode)
    layers.npz      optional: one layer at a time on stored inputs, named {mode}/layer{i}/{what}
"""

from __future__ import annotations

import dataclasses
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hysparse import json_text

MODES = ("exact", "kvquant", "official")

# What a run is made from; there is nothing to compare it with.
INPUTS = {
  "tokens": "an input: what the run reads",
  "token_types": "an input: what the run reads",
  "patches": "an input: what the run reads",
  "start_nh_nw": "an input: where an image stands",
  "logit_positions": "an input: which logits are stored",
  "resid_positions": "an input: which residuals are stored",
  "dspark_steps": "an input: at which steps drafts are stored",
  "input": "an input: what the layer reads",
  "pre_mix": "an input: what the layer reads",
  "engram_input": "an input: what Engram reads",
}
AS_SHIPPED = "a kept defect of the published code (stale index keys), not what it should give"


class CaseError(ValueError):
  """A folder that is no parity case; one line that names the file."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One prompt and what follows it.

  Attributes:
    name: "A" for instance; the arrays of the run have it in their names.
    prompt: tokens of the prefill, S.
    steps: tokens fed one by one after it.
  """

  name: str
  prompt: int
  steps: int


@dataclasses.dataclass(frozen=True)
class Image:
  """One image of a run: patches [n_h * n_w, 3, p, p] and its span's first token."""

  patches: np.ndarray
  start: int
  grid: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Case:
  """The arrays of a case; see the module docstring.

  Attributes:
    about: case.json.
    runs: its runs, in order.
    expected: arrays of expected.npz.
    layers: arrays of layers.npz, bfloat16 as float32; empty if the case has none.
  """

  about: Mapping[str, Any]
  runs: tuple[Run, ...]
  expected: Mapping[str, np.ndarray]
  layers: Mapping[str, np.ndarray]

  @property
  def modes(self) -> tuple[str, ...]:
    """The numeric modes that the arrays have."""
    found = {name.split("/")[0] for name in (*self.expected, *self.layers)}
    return tuple(mode for mode in MODES if mode in found)

  @property
  def layered_run(self) -> Run:
    """The run whose prefill layers.npz describes: by the number of its positions, and where that
    leaves a choice by case.json, whose `files` says "prefill A" for instance.

    Raises:
      CaseError: there is none, or it cannot be told.
    """
    lengths = {len(x) for name, x in self.layers.items() if name.endswith("/pre_mix")}
    found = [run for run in self.runs if {run.prompt} == lengths]
    if not found:
      raise CaseError(
        f"layers.npz: has mixes of {sorted(lengths)} positions; no run has such a prompt"
      )
    if len(found) > 1:
      files = self.about.get("files")
      said = str(files.get("layers.npz")) if isinstance(files, dict) else ""
      named = [run for run in found if re.search(rf"\bprefill {re.escape(run.name)}\b", said)]
      if len(named) != 1:
        names = " and ".join(run.name for run in found)
        raise CaseError(
          f"layers.npz: the runs {names} have equally long prompts; `files` of case.json must say"
          f" of which it is, like 'prefill {found[0].name}'"
        )
      found = named
    return found[0]

  def images(self, run: Run, row: int) -> list[tuple[str, Image]]:
    """(name, image) of one batch row, in the order of their spans."""
    found = []
    for j in range(len(self.expected)):
      name = f"image{row}_{j}"
      if f"{run.name}/{name}/patches" not in self.expected:
        break
      start, *grid = (int(n) for n in self.expected[f"{run.name}/{name}/start_nh_nw"])
      image = Image(self.expected[f"{run.name}/{name}/patches"], start, tuple(grid))
      found.append((name, image))
    return sorted(found, key=lambda item: item[1].start)


def not_comparable(name: str) -> str | None:
  """Why an array is not compared; None if it is."""
  what = name.rsplit("/", 1)[-1]
  if what.endswith("_as_shipped"):
    return AS_SHIPPED
  return INPUTS.get(what)


def read(folder: str | Path) -> Case:
  """Reads and checks a case.

  Raises:
    CaseError: a file that is missing or broken, or arrays that are not those of case.json.
  """
  folder = Path(folder)
  if not folder.is_dir():
    raise CaseError(f"{folder}: no such folder; must be a parity case")
  if not (folder / "case.json").exists():
    raise CaseError(f"{folder}: has no case.json; must be a case, like tests/golden/tiny-text")
  try:
    about = json_text.parse((folder / "case.json").read_bytes())
  except (OSError, ValueError) as error:
    raise CaseError(f"{folder / 'case.json'}: cannot be read: {_line(error)}") from None
  expected = _arrays(folder / "expected.npz")
  layers = _arrays(folder / "layers.npz") if (folder / "layers.npz").exists() else {}
  layers = {name: _from_bits(array) for name, array in layers.items()}
  for problem in _problems(about, expected):
    raise CaseError(f"{folder / 'expected.npz'}: {problem}")
  for problem in _layer_problems(about, layers):
    raise CaseError(f"{folder / 'layers.npz'}: {problem}")
  runs = tuple(Run(name, int(r["S"]), int(r["n_decode"])) for name, r in about["runs"].items())
  for run in runs:
    # A prompt shorter than the window leaves slots of its ring unwritten: they mean nothing.
    for name in [n for n in expected if re.search(rf"/{re.escape(run.name)}/.*/window_kv$", n)]:
      expected[name] = expected[name][:, : run.prompt]
  return Case(about, runs, expected, layers)


def _arrays(path: Path) -> dict[str, np.ndarray]:
  try:
    with np.load(path) as arrays:
      return {name: arrays[name] for name in arrays.files}
  except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
    raise CaseError(f"{path}: cannot be read: {_line(error)}") from None


def _from_bits(x: np.ndarray) -> np.ndarray:
  """bfloat16 bits, which layers.npz keeps as uint16, as float32; other arrays as they are."""
  return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def _problems(about: Any, expected: Mapping[str, np.ndarray]) -> Iterator[str]:
  """What keeps the arrays from being those that case.json describes."""
  if not isinstance(about, dict) or not isinstance(about.get("runs"), dict) or not about["runs"]:
    yield "case.json beside it has no runs"
    return
  for part in ("arrays", "suggested_limits", "tolerances"):
    if not isinstance(about.get(part, {}), dict):
      yield f"case.json beside it: {part} is {about[part]!r}; must be a group or absent"
      return
  for name, (shape, dtype) in about.get("arrays", {}).items():
    if name not in expected:
      yield f"lacks {name}, which case.json lists"
    elif (list(expected[name].shape), str(expected[name].dtype)) != (shape, dtype):
      found = expected[name]
      yield f"{name} is {found.dtype} {list(found.shape)}; case.json says {dtype} {shape}"
  for name, array in expected.items():
    if array.dtype.kind not in "biuf":
      yield f"{name} is {array.dtype}; must be real numbers"
      return
  for name, run in about["runs"].items():
    if not isinstance(run, dict) or not all(type(run.get(n)) is int for n in ("S", "n_decode")):
      yield f"case.json beside it lacks S or n_decode of run {name} as whole numbers"
      return
    if run["S"] < 1 or run["n_decode"] < 0:
      yield f"run {name}: S is {run['S']} and n_decode {run['n_decode']}; must be 1 and 0 or more"
      return
    needed = run["S"] + run["n_decode"] + any(_is_draft(name, array) for array in expected)
    for array in ("tokens", "logit_positions"):
      if f"{name}/{array}" not in expected:
        yield f"lacks {name}/{array}, without which run {name} cannot be repeated"
        return
    tokens = expected[f"{name}/tokens"]
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or tokens.shape[1] < needed:
      yield f"{name}/tokens is {tokens.dtype} {list(tokens.shape)}, not integers [batch, {needed}]"
      return
    yield from _misfits(name, run, len(tokens), expected)


def _layer_problems(about: Any, layers: Mapping[str, np.ndarray]) -> Iterator[str]:
  """What keeps the arrays from being those of single layers on one of the runs' prompts."""
  prompts = {run["S"] for run in about["runs"].values()}
  read = {}
  for name, array in layers.items():
    if array.dtype.kind not in "biuf" or array.ndim < 2:
      yield f"{name} is {array.dtype} {list(array.shape)}; must be real numbers [positions, ...]"
    elif INPUTS.get(name.rsplit("/", 1)[-1]):
      read[name] = len(array)
  for name, positions in read.items():
    if positions not in prompts or positions != next(iter(read.values())):
      legal = ", ".join(map(str, sorted(prompts)))
      yield f"{name} has {positions} positions; all inputs must have those of one run: {legal}"


def _misfits(
  name: str, run: Mapping[str, int], batch: int, expected: Mapping[str, np.ndarray]
) -> Iterator[str]:
  """Selections of a run that are not as long as it is, or select what cannot exist."""
  total = run["S"] + run["n_decode"]
  leading = {
    **dict.fromkeys(("topk", "candidates", "experts"), (batch, run["S"])),
    **dict.fromkeys(("decode_topk", "decode_logits"), (run["n_decode"], batch)),
  }
  for key, array in expected.items():
    what = key.rsplit("/", 1)[-1]
    if f"/{name}/" not in key or what not in leading:
      continue
    if array.shape[:2] != leading[what]:
      yield f"{key} is {list(array.shape)}; run {name} needs {list(leading[what])} in front"
    elif what in ("topk", "decode_topk") and array.size and array.max() >= total:
      yield f"{key} selects entry {array.max()}; a run of {total} tokens has none"


def _is_draft(run: str, array: str) -> bool:
  return re.search(rf"(^|/){re.escape(run)}/dspark\d+/", array) is not None


def _line(error: Exception) -> str:
  return " ".join(str(error).split()) or type(error).__name__
