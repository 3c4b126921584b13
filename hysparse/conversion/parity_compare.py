"""Comparing one array of ours with one that is stored: which measure fits which array.

| array | exact | kvquant, official |
|---|---|---|
| logits, confidence | largest error | rms error (confidence: largest) |
| residuals, draft inputs, aligner rows, | largest error over the | rms error over the rms |
| expert weights (by expert) | rms of its vector | of the array |
| cached entries, keys, window rows | the same | kvquant: share that is not equal |
| selections, pools, experts | rows that differ as sets | wrong entries in rows with a choice |
| Engram rows, hash constants | rows that differ | the same |
| draft ids | rows that differ | ids that are not greedy in their own logits |

A selection has a choice where more entries are visible than it may take; any difference elsewhere
counts as total. Draft ids of the chaotic modes may differ from the stored ones, but both must be
the argmax of the logits beside them, and the anchor must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from hysparse.conversion.parity_limits import ModeLimits

_TINY = 1e-30  # an all-zero vector has no scale

_LOGITS = ("prefill_logits", "decode_logits", "logits")
_VECTORS = ("residual", "main_hidden", "embeds")
_CACHED = ("window_kv", "compressed_kv", "index_k")
_SETS = ("topk", "decode_topk", "candidates", "experts")
_NUMBERS = ("engram_hash_ids", "primes", "offsets", "multipliers")
_LAYER = ("output", "attn_out", "next_pre_mix", "engram_out")

Arrays = Mapping[str, np.ndarray]


class NoRule(LookupError):
  """An array of a kind that nothing here compares."""


@dataclasses.dataclass(frozen=True)
class Check:
  """One comparison.

  Attributes:
    name: of the stored array.
    what: which error was measured.
    error: infinite where shapes differ.
    limit: the largest error that passes.
  """

  name: str
  what: str
  error: float
  limit: float

  @property
  def passed(self) -> bool:
    return bool(self.error <= self.limit)  # NaN fails


def end_to_end(
  name: str, ours: Arrays, stored: Arrays, limits: ModeLimits, choice: np.ndarray | None
) -> Check:
  """Compares an array of expected.npz.

  Args:
    name: of an array that both have.
    choice: for selections and pools, True for the rows [...] that leave something out; None: all.

  Raises:
    NoRule: an array of another kind.
  """
  mode, what = name.split("/", 1)[0], name.rsplit("/", 1)[-1]
  mine, theirs = ours[name], stored[name]
  strict = mode not in ("kvquant", "official")
  if what in _SETS:
    if what != "candidates":
      mine, theirs = members(mine, theirs)
    if mine.shape != theirs.shape:
      return _misshapen(name, mine, theirs)
    if strict:
      return Check(name, "rows that differ", differing_rows(mine, theirs), 0)
    error = mismatch(mine, theirs, choice)
    return Check(name, "wrong entries in rows with a choice", error, limits.mismatch)
  if mine.shape != theirs.shape:
    return _misshapen(name, mine, theirs)
  if what in _NUMBERS or (what == "ids" and strict):
    return Check(name, "rows that differ", differing_rows(mine, theirs), 0)
  if what == "ids":
    logits = name.removesuffix("ids") + "logits"
    error = not_greedy(mine, ours[logits], theirs, stored[logits])
    return Check(name, "drafts that are not greedy", error, 0)
  if what == "confidence" or (what in _LOGITS and strict):
    limit = limits.confidence if what == "confidence" else limits.logits
    return Check(name, "largest error", largest(mine, theirs), limit)
  if what == "logits":
    mine, theirs = (_drafts(arrays, name, stored) for arrays in (ours, stored))
    return Check(name, "rms error of the run's drafts", rms(mine - theirs), limits.logits)
  if what in _LOGITS:
    return Check(name, "rms error", rms(mine - theirs), limits.logits)
  if what in _CACHED and mode == "kvquant":
    share = float((mine != theirs).mean()) if mine.size else 0.0  # a prompt shorter than the ratio
    if not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
      share = np.inf  # however few they are
    return Check(name, "share of unequal values", share, limits.unequal)
  if what == "expert_weights":
    ids = name.removesuffix("expert_weights") + "experts"
    count = 1 + int(max(ours[ids].max(), stored[ids].max()))
    mine, theirs = (by_expert(a[ids], a[name], count) for a in (ours, stored))
  elif what not in (*_CACHED, *_VECTORS):
    raise NoRule(name)
  limit = limits.embeds if what == "embeds" else limits.relative
  if strict:
    axes = (-2, -1) if what == "residual" else (-1,)
    error = largest_relative(mine, theirs, axes)
    return Check(name, "largest error / rms of its vector", error, limit)
  return Check(name, "rms error / rms", rms(mine - theirs) / max(rms(theirs), _TINY), limit)


def one_layer(name: str, ours: Arrays, stored: Arrays, limits: ModeLimits) -> Check:
  """Compares an array of layers.npz; rows are positions.

  Raises:
    NoRule: an array of another kind.
  """
  what = name.rsplit("/", 1)[-1]
  mine, theirs = ours[name], stored[name]
  if what == "topk":
    mine, theirs = members(mine, theirs)
  if mine.shape != theirs.shape:
    return _misshapen(name, mine, theirs)
  if what == "topk":
    differing = (mine != theirs).any(-1)
    limit = float(np.floor(limits.layer_rows * len(differing)))
    scores = ours.get(f"{name}_scores")
    if scores is None:
      return Check(name, "rows that differ", float(differing.sum()), limit)
    worse = differing & ~same_scores(mine, theirs, scores)
    return Check(name, "rows with other scores", float(worse.sum()), limit)
  if what not in _LAYER:
    raise NoRule(name)
  rows = row_errors(mine, theirs)
  found = [
    Check(name, f"{statistic}, relative rms", _STATISTICS[statistic](rows), limit)
    for statistic, limit in (limits.attention if what == "attn_out" else limits.layer)
  ]
  return min(found, key=lambda check: (check.passed, -check.error / check.limit))


# --- Measures, in float64 -------------------------------------------------------------------------


def largest(mine: np.ndarray, theirs: np.ndarray) -> float:
  return float(np.abs(_wide(mine) - _wide(theirs)).max(initial=0))


def rms(x: np.ndarray) -> float:
  return float(np.sqrt((_wide(x) ** 2).mean())) if x.size else 0.0


def largest_relative(mine: np.ndarray, theirs: np.ndarray, axes: tuple[int, ...]) -> float:
  """Each error over the rms of its stored vector, which runs along `axes`."""
  scale = np.sqrt((_wide(theirs) ** 2).mean(axes, keepdims=True))
  return float((np.abs(_wide(mine) - _wide(theirs)) / np.maximum(scale, _TINY)).max(initial=0))


def row_errors(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
  """Relative rms error of each row [rows, ...]."""
  difference = (_wide(mine) - _wide(theirs)).reshape(len(mine), -1)
  scale = np.sqrt((_wide(theirs).reshape(len(mine), -1) ** 2).mean(1))
  return np.sqrt((difference**2).mean(1)) / np.maximum(scale, _TINY)


def differing_rows(mine: np.ndarray, theirs: np.ndarray) -> float:
  return float((mine != theirs).any(-1).sum())


def mismatch(mine: np.ndarray, theirs: np.ndarray, choice: np.ndarray | None) -> float:
  """Mean share of wrong members over the rows with a choice; infinite if another row differs.

  Args:
    mine, theirs: masks [..., T].
    choice: [...] or what broadcasts to it, True where a row leaves something out; None: all do.
  """
  size = np.maximum(np.maximum(mine.sum(-1), theirs.sum(-1)), 1)
  wrong = 1 - (mine & theirs).sum(-1) / size
  # Two empty rows agree.
  wrong = np.where(mine.any(-1) | theirs.any(-1), wrong, 0)
  choice = np.broadcast_to(True if choice is None else choice, wrong.shape)
  if wrong[~choice].any():
    return np.inf
  return float(wrong[choice].mean()) if choice.any() else 0.0


def same_scores(mine: np.ndarray, theirs: np.ndarray, scores: np.ndarray) -> np.ndarray:
  """Rows whose two selections (masks [rows, T]) have the same scores: a choice among equals."""
  scores = scores[:, : mine.shape[1]]
  ranked = (np.sort(np.where(mask, scores, -np.inf), axis=1) for mask in (mine, theirs))
  return np.equal(*ranked).all(1)


def not_greedy(
  mine: np.ndarray, my_logits: np.ndarray, theirs: np.ndarray, logits: np.ndarray
) -> float:
  """Drafts [B, 1 + block] after another anchor, or not the argmax of the logits beside them."""
  bad = (mine[:, :1] != theirs[:, :1]).sum()
  for ids, scores in ((mine, my_logits), (theirs, logits)):
    bad += (ids[:, 1:] != scores.argmax(-1)).sum()
  return float(bad)


# --- Lists of numbers as vectors ------------------------------------------------------------------


def members(mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Lists of numbers [..., K], -1 for none, as masks over the numbers that occur."""
  size = 1 + max(int(mine.max(initial=-1)), int(theirs.max(initial=-1)))
  everywhere = (np.ones(rows.shape, bool) for rows in (mine, theirs))
  return tuple(
    _scatter(rows, ones, size) for rows, ones in zip((mine, theirs), everywhere, strict=True)
  )


def by_expert(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
  """Weights [..., A] of experts `ids` as [..., E], 0 for those not chosen."""
  return _scatter(ids, weights, experts)


def _scatter(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
  """Values [..., K] at places [..., K] of zeros [..., size]; negative places are dropped."""
  spread = np.zeros((*places.shape[:-1], size + 1), values.dtype)
  np.put_along_axis(spread, np.where(places < 0, size, places).astype(np.int64), values, -1)
  return spread[..., :size]


_STATISTICS = {
  "median row": lambda rows: float(np.median(rows)),
  "90th percentile row": lambda rows: float(np.percentile(rows, 90)),
  "worst row": lambda rows: float(rows.max()),
}


def _drafts(arrays: Arrays, name: str, stored: Arrays) -> np.ndarray:
  """The logits of all stored drafts of the run that `name` belongs to: one draft is too few."""
  run = name.rsplit("/", 2)[0]
  names = [n for n in stored if n.startswith(f"{run}/dspark") and n.endswith("/logits")]
  return np.stack([arrays[n] for n in names if n in arrays])


def _wide(x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float64)


def _misshapen(name: str, mine: np.ndarray, theirs: np.ndarray) -> Check:
  return Check(name, f"shape is {list(mine.shape)}, stored is {list(theirs.shape)}", np.inf, 0)
