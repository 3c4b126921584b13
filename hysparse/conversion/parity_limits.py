"""How far our arrays may be from the stored ones, per numeric mode.

A case brings its own limits (`suggested_limits`) and what the published code itself varies by when
only its rounding or its summation order changes (`tolerances`). This file turns both into the
numbers that the comparison uses; a constant stands in where a case lacks a figure.

Only `exact` is strict end to end. A stack of random weights is chaotic in its discrete choices: in
`kvquant` and `official` one rounding that goes the other way changes an expert or a selected entry,
and everything after it. There the limits end to end say "not further off than the published code is
from itself"; quantised numerics are tested strictly one layer at a time, on stored inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# A case grants any float32 implementation 5e-5 on exact logits. That hides eps in the Sinkhorn sums
# (3e-5), so we hold a fifth of what is granted: 1e-5. Float32 itself needs 3e-6. Weights that
# amplify rounding more than that (the case records by how much) get three times what the published
# code's own float32 needs, and never more than is granted.
EXACT_SHARE = 0.2
EXACT_LOGITS = 5e-5
EXACT_SLACK = 3.0
# One layer in exact mode, and the median row in kvquant, where nothing flips: float32 needs 5e-7.
LAYER_FLOAT32 = 1e-5

# Where a case lacks its own figure. Logits have a standard deviation of 1; the published code moves
# by 0.03 rms (kvquant, noise of 5e-7 at the quantisers) and 0.2 (official, other summation order).
KVQUANT_RMS = 0.09
OFFICIAL_RMS = 0.33
KVQUANT_EQUAL = 0.995  # share of cached values without a flip
KVQUANT_LAYER_WORST = 0.18  # an expert that changes at one position: 0.06
OFFICIAL_LAYER_MEDIAN = 0.015  # bfloat16 rounding: 0.007
OFFICIAL_LAYER_P90 = 0.035
# Beyond the choices among equal scores: bfloat16 rounding that flips a code of a query or a key.
# In 400 recorded selections it changed none, so it may change one in fifty here.
OFFICIAL_LAYER_ROWS = 0.02

# The slack that suggested_limits gives over what was measured; used the same way for figures that
# `tolerances` records but `suggested_limits` leaves out.
KVQUANT_SLACK = 3.0
OFFICIAL_SLACK = 1.5
LAYER_SLACK = 2.0

# Selections in kvquant end to end: one flip in an array of a few hundred selected entries, even if
# the recorded noise trials happened to have none.
KVQUANT_MISMATCH = 0.02
# Selections in official end to end, at most and if there is no kvquant to measure against. What
# differs by rounding only differs in 0.3 of the entries; a random selection would in 0.75 and more.
OFFICIAL_MISMATCH = 0.5
CONFIDENCE_OFFICIAL = 0.6  # largest error of a confidence; measured 0.4

_NOISE = "float32 with 5e-7 relative noise"
_ORDER = "other summation order"
_FLOAT32 = "float32 vs float64"


@dataclasses.dataclass(frozen=True)
class ModeLimits:
  """Limits of one mode, end to end and one layer at a time.

  Attributes:
    logits: of the largest error in exact, of the rms error otherwise.
    relative: the same for everything else that is a vector, over the vector's own rms.
    confidence: of the largest error.
    unequal: share of cached values that may differ at all (kvquant).
    mismatch: mean share of wrong entries in selections and pools with a choice.
    embeds: relative error of aligner rows, which involve no discrete choice.
    layer: (statistic, limit) over the relative rms errors of a layer's rows.
    attention: the same for attention outputs.
    layer_rows: share of a layer's selections that may differ.
  """

  logits: float
  relative: float
  confidence: float
  unequal: float
  mismatch: float
  embeds: float
  layer: tuple[tuple[str, float], ...]
  attention: tuple[tuple[str, float], ...]
  layer_rows: float


def limits(about: Mapping[str, Any], mode: str, mode_distance: float | None) -> ModeLimits:
  """The limits of a case in one mode.

  Args:
    about: case.json.
    mode_distance: mean share of entries in which the stored selections of official and kvquant
      differ, the largest of all arrays; None without such arrays. What rounding alone does to the
      selections, which a case does not record otherwise.
  """
  suggested = about.get("suggested_limits", {})

  def suggest(start: str, default: float) -> float:
    return next((float(v) for key, v in suggested.items() if key.startswith(start)), default)

  if mode == "exact":
    granted = min(suggest("exact: logits max_abs", EXACT_LOGITS), EXACT_LOGITS)
    recorded = [
      EXACT_SLACK * part["max_abs"]
      for name, trial in about.get("tolerances", {}).items()
      if name.startswith("exact/") and _FLOAT32 in name
      for part in (trial[kind] for kind in ("prefill", "decode") if kind in trial)
    ]
    strict = min(granted, max([EXACT_SHARE * granted, *recorded]))
    worst = (("worst row", min(suggest("layers.npz exact: worst", LAYER_FLOAT32), LAYER_FLOAT32)),)
    return ModeLimits(strict, strict, strict, 0.0, 0.0, strict, worst, worst, 0.0)

  layer_trials = about.get("tolerances", {}).get("layers.npz", {})
  if mode == "kvquant":
    rms = suggest("kvquant: logits rms", KVQUANT_RMS)
    noise = _trial(about, "kvquant/", _NOISE)
    rows = (
      ("median row", suggest("layers.npz kvquant: median", LAYER_FLOAT32)),
      ("worst row", suggest("layers.npz kvquant: worst", KVQUANT_LAYER_WORST)),
    )
    return ModeLimits(
      logits=rms,
      relative=rms,
      confidence=max(rms, KVQUANT_SLACK * noise.get("dspark_confidence_max_abs", 0.0)),
      unequal=1 - suggest("kvquant: fraction", KVQUANT_EQUAL),
      mismatch=max(KVQUANT_MISMATCH, KVQUANT_SLACK * _share(noise)),
      embeds=EXACT_SHARE * suggest("exact: logits max_abs", EXACT_LOGITS),
      layer=rows,
      attention=rows,
      layer_rows=0.0,
    )

  rms = suggest("official: end-to-end logits rms", OFFICIAL_RMS)
  order = _trial(about, "official/", _ORDER)
  median = suggest("layers.npz official: median", OFFICIAL_LAYER_MEDIAN)
  p90 = suggest("layers.npz official: 90th", OFFICIAL_LAYER_P90)
  attention_median = LAYER_SLACK * _most(layer_trials, "official", "attn_rel_rms_median", median)
  attention_worst = LAYER_SLACK * _most(layer_trials, "official", "attn_rel_rms_max", p90)
  return ModeLimits(
    logits=rms,
    relative=rms,
    confidence=OFFICIAL_SLACK * order["dspark_confidence_max_abs"]
    if "dspark_confidence_max_abs" in order
    else CONFIDENCE_OFFICIAL,
    unequal=1.0,
    mismatch=min(OFFICIAL_MISMATCH, OFFICIAL_SLACK * (mode_distance or 1.0)),
    embeds=p90,
    layer=(("median row", median), ("90th percentile row", p90)),
    # Too few rows are stored for a percentile, and attention alone lacks the residual beside it.
    attention=(("median row", attention_median), ("worst row", attention_worst)),
    layer_rows=OFFICIAL_LAYER_ROWS,
  )


def _trial(about: Mapping[str, Any], start: str, words: str) -> Mapping[str, Any]:
  """What `tolerances` records of a trial, {} if it does not."""
  trials = about.get("tolerances", {}).items()
  return next((t for key, t in trials if key.startswith(start) and words in key), {})


def _share(trial: Mapping[str, Any]) -> float:
  return trial.get("topk_rows_differing", 0) / max(trial.get("topk_rows", 1), 1)


def _most(trials: Mapping[str, Any], mode: str, figure: str, default: float) -> float:
  """The largest value of a figure over the layers and trials of a mode."""
  found = [
    layer[figure]
    for name, layers in trials.items()
    if name.startswith(mode)
    for layer in layers.values()
    if figure in layer
  ]
  return max(found, default=default)
