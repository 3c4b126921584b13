"""Is this the published model? Compares everything that a case stores with what our model computes.

    report = check(hysparse.load(folder), parity_case.read(folder))
    report.ok

Each run of the case is prefilled and then decoded token by token through one cache, with drafts
from the same cache; each layer is also run alone on stored inputs. What is compared with what, and
how strictly, depends on the numeric mode:

- `exact`, strict: every logit, draft logit and confidence within 1e-5, residuals and cached rows
  within 1e-5 of their scale, all discrete choices equal.
- `kvquant` one layer at a time, strict: on equal inputs the rows equal to float32 rounding, up to
  the few where a value lies on a boundary between two codes.
- `official` one layer at a time: within what another summation order makes of bfloat16.
- `kvquant` and `official` end to end, loose, because one rounding that flips changes all that
  follows: rms limits, and selections may differ where they have a choice.

An array of the case that no rule covers, or that our model does not give, is not passed over: the
report is not ok. Limits come from the case (`parity_limits`), measures are in `parity_compare`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from hysparse.config import Config, ConfigError, ModelConfig
from hysparse.conversion import parity_compare, parity_layers, parity_run
from hysparse.conversion.parity_case import MODES, Case, CaseError, not_comparable
from hysparse.conversion.parity_compare import Arrays, Check
from hysparse.conversion.parity_limits import ModeLimits, limits
from hysparse.conversion.shards import FolderError
from hysparse.nn.model import abstract
from hysparse.tokenizer import TokenizerError

# What a folder can be wrong in; each is one line.
USER_ERRORS = (CaseError, ConfigError, FolderError, TokenizerError)


@dataclasses.dataclass(frozen=True)
class Report:
  """What came of it.

  Attributes:
    checks: one for each array that was compared.
    inputs: (array, why there is nothing to compare).
    missed: (array, why it was not compared although it should have been).
    other_modes: arrays of modes that were not asked for.
  """

  checks: tuple[Check, ...]
  inputs: tuple[tuple[str, str], ...]
  missed: tuple[tuple[str, str], ...]
  other_modes: tuple[str, ...]

  @property
  def failed(self) -> tuple[Check, ...]:
    return tuple(check for check in self.checks if not check.passed)

  @property
  def ok(self) -> bool:
    return bool(self.checks) and not self.failed and not self.missed

  def lines(self) -> Iterator[str]:
    """The report as text."""
    width = max((len(check.name) for check in self.checks), default=0)
    for check in self.checks:
      verdict = "pass" if check.passed else "FAIL"
      figures = f"{check.error:10.3g} of {check.limit:<8.3g}"
      yield f"{verdict}  {check.name:{width}}  {figures}  {check.what}"
    for name, why in self.inputs:
      yield f"----  {name:{width}}  not compared: {why}"
    for name, why in self.missed:
      yield f"MISS  {name:{width}}  {why}"
    passed = len(self.checks) - len(self.failed)
    yield (
      f"{passed} of {len(self.checks)} arrays pass, {len(self.failed)} fail, {len(self.missed)}"
      f" were not compared; {len(self.inputs)} are not comparable, {len(self.other_modes)} are of"
      " modes not asked for"
    )

  def to_dict(self) -> dict[str, Any]:
    """For JSON: an error that is not finite is null."""
    checks = [
      dataclasses.asdict(check)
      | {"error": check.error if np.isfinite(check.error) else None, "passed": check.passed}
      for check in self.checks
    ]
    return {
      "ok": self.ok,
      "checks": checks,
      "inputs": dict(self.inputs),
      "missed": dict(self.missed),
      "other_modes": list(self.other_modes),
    }


@dataclasses.dataclass(frozen=True)
class Outputs:
  """What our model gives, under the names of expected.npz and of layers.npz."""

  expected: dict[str, np.ndarray]
  layers: dict[str, np.ndarray]


def check(config: Config, state: nnx.State, case: Case, modes: Sequence[str] = MODES) -> Report:
  """Runs the model on a case and compares.

  Args:
    config: of the loaded checkpoint; its numerics and compute dtype are set here.
    state: the loaded arrays, quantised leaves or not.
    modes: of those that the case has.

  Raises:
    CaseError: a mode that the case lacks, or stored inputs that are missing.
  """
  for mode in modes:
    if mode not in case.modes:
      raise CaseError(f"mode: is {mode!r}; the case has {', '.join(case.modes)}")
  ours = Outputs(run_all(config, state, case, modes), run_layers(config, state, case, modes))
  return compare(config.model, case, ours, modes)


def run_all(
  config: Config, state: nnx.State, case: Case, modes: Sequence[str]
) -> dict[str, np.ndarray]:
  """Prefill, decode and drafts of every run, end to end."""
  found = parity_run.hash_constants(config.model)
  for mode in modes:
    for run in case.runs:
      with _float32_products():
        arrays = parity_run.end_to_end(state, _in_mode(config, mode), case, run)
      hashed = f"{run.name}/engram_hash_ids"  # has no mode: it is the same in all
      found |= {name if name == hashed else f"{mode}/{name}": x for name, x in arrays.items()}
  return found


def run_layers(
  config: Config, state: nnx.State, case: Case, modes: Sequence[str]
) -> dict[str, np.ndarray]:
  """Every layer alone, at the positions that the case stores."""
  found = {}
  for mode in modes:
    if not any(name.startswith(f"{mode}/") for name in case.layers):
      continue
    with _float32_products():
      graphdef = abstract(_in_mode(config, mode))[0]
      arrays = parity_layers.layer_by_layer(graphdef, state, config.model, case)
    found |= {f"{mode}/{name}": x for name, x in arrays.items()}
  return {name: _stored_rows(case, name, x) for name, x in found.items()}


def compare(config: ModelConfig, case: Case, ours: Outputs, modes: Sequence[str]) -> Report:
  """Compares every array of the given modes, and those without a mode, with ours."""
  choices = {n: c for run in case.runs for n, c in parity_run.choices(config, run).items()}
  distance = _mode_distance(case, choices)
  mode_limits = {mode: limits(case.about, mode, distance) for mode in MODES}
  parts = _Parts([], [], [], [])
  for name in case.expected:
    choice = choices.get(name.split("/", 1)[-1])
    rule = functools.partial(parity_compare.end_to_end, choice=choice)
    parts.sort(name, modes, ours.expected, case.expected, mode_limits, rule)
  for name in case.layers:
    parts.sort(name, modes, ours.layers, case.layers, mode_limits, parity_compare.one_layer)
  return Report(*(tuple(part) for part in (parts.checks, parts.inputs, parts.missed, parts.other)))


@dataclasses.dataclass
class _Parts:
  """A report in the making."""

  checks: list[Check]
  inputs: list[tuple[str, str]]
  missed: list[tuple[str, str]]
  other: list[str]

  def sort(
    self,
    name: str,
    modes: Sequence[str],
    ours: Arrays,
    stored: Arrays,
    mode_limits: Mapping[str, ModeLimits],
    rule: Callable[[str, Arrays, Arrays, ModeLimits], Check],
  ) -> None:
    """Compares an array, or says why not."""
    mode = name.split("/", 1)[0]
    why = not_comparable(name)
    if why is not None:
      self.inputs.append((name, why))
    elif mode in MODES and mode not in modes:
      self.other.append(name)
    elif name not in ours:
      self.missed.append((name, "our model gives no such array"))
    else:
      # What has no mode (hashes) is integers, equal in all of them.
      limit = mode_limits[mode if mode in MODES else "exact"]
      try:
        self.checks.append(rule(name, ours, stored, limit))
      except parity_compare.NoRule:
        self.missed.append((name, "no rule compares such an array"))


def _in_mode(config: Config, mode: str) -> Config:
  train = dataclasses.replace(config.train, numerics=mode, compute_dtype="float32")
  return dataclasses.replace(config, train=train)


def _float32_products() -> contextlib.AbstractContextManager:
  """Accelerators would compute float32 products from TF32 or bfloat16 parts, which hides all."""
  return jax.default_matmul_precision("highest")


def _stored_rows(case: Case, name: str, ours: np.ndarray) -> np.ndarray:
  """The positions of an array of a layer that the case stores: all, or those of the residuals."""
  run, stored = case.layered_run, case.layers.get(name)
  positions = case.expected.get(f"{run.name}/resid_positions")
  if stored is None or positions is None or len(stored) != len(positions):
    return ours
  return ours[positions]


def _mode_distance(case: Case, choices: Mapping[str, np.ndarray]) -> float | None:
  """How far the stored selections of official and kvquant are apart; see `limits`."""
  found = [
    parity_compare.mismatch(
      *parity_compare.members(*(case.expected[f"{mode}/{name}"] for mode in MODES[1:])), choice
    )
    for name, choice in choices.items()
    if name.endswith("topk") and all(f"{mode}/{name}" in case.expected for mode in MODES[1:])
  ]
  return max(found, default=None)
