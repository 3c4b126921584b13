"""The schedule in the fields of a released config.json, both ways.

Source: arXiv 2609.19969, released `text_config`; the bar has no field there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from hysparse.schedule import PLAIN, LayerSpec, Schedule, ScheduleError, build


def from_published(
  fields: Mapping[str, Any], *, decoder_start: int | Literal["auto"] | None = "auto"
) -> Schedule:
  """Reads the schedule of a released `text_config`.

  Args:
    fields: num_hidden_layers, compress_ratios, kv_source_layer_ids, index_source_layer_ids and,
      where present, candidate_source_layer_id (-1: none), engram_layer_ids.
    decoder_start: the bar is not a published field. "auto" puts it where `bar_on_import` says;
      None leaves it out.

  Raises:
    ScheduleError: a missing field, or fields that contradict each other.
  """
  for name in ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids"):
    if name not in fields:
      raise ScheduleError(f"config.json: {name} is missing")
  count = fields["num_hidden_layers"]
  ratios = list(fields["compress_ratios"])
  draft_layers = fields.get("num_nextn_predict_layers") or 0
  if len(ratios) not in (count, count + draft_layers):
    raise ScheduleError(
      f"compress_ratios: has {len(ratios)} entries; {count} layers"
      + (f" (or {count + draft_layers} with the draft layers)" if draft_layers else "")
    )
  for i, ratio in enumerate(ratios):
    if ratio < 0 or (ratio and i >= count):
      legal = "0 or more" if i < count else "0: draft layers have a window only"
      raise ScheduleError(f"compress_ratios: layer {i} has {ratio}; must be {legal}")
  kv, index = (
    set(fields.get(name) or ()) for name in ("kv_source_layer_ids", "index_source_layer_ids")
  )
  candidate = fields.get("candidate_source_layer_id")
  candidate = -1 if candidate is None else candidate
  for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
    for i in sorted(ids):
      if not 0 <= i < count:
        raise ScheduleError(f"{name}: layer {i} is outside 0..{count - 1}")
      if ratios[i] == 0:
        raise ScheduleError(f"{name}: layer {i} has compress_ratio 0, so it reads no entries")
  if candidate != -1 and candidate not in index:
    raise ScheduleError(
      f"candidate_source_layer_id: layer {candidate} selects nothing: it is not in"
      " index_source_layer_ids"
    )
  drafts = []
  for i in range(count):
    if ratios[i] == 0:
      mode = "swa"
    elif i in kv:
      if i not in index:
        raise ScheduleError(f"layer {i}: is a KV source but not in index_source_layer_ids")
      mode = "full"
    else:
      mode = "reindex" if i in index else "reuse"
    role = "source" if i == candidate else None
    drafts.append(LayerSpec(mode=mode, ratio=ratios[i], candidate_role=role))
  if decoder_start == "auto":
    decoder_start = bar_on_import(kv, ratios)
  return build(drafts, tuple(fields.get("engram_layer_ids") or ()), decoder_start=decoder_start)


def bar_on_import(kv_sources: Collection[int], ratios: Sequence[int]) -> int | None:
  """Where the bar is put when a config.json is read: before a last source of ratio 1, else none."""
  last = max(kv_sources, default=0)
  return last if last > 0 and ratios[last] == 1 else None


def to_published(schedule: Schedule, draft_layers: int = 0) -> dict[str, Any]:
  """The released fields of this schedule (the bar has none).

  Raises:
    ScheduleError: modes without a published field, all of them by layer.
  """
  foreign = [
    f"layer {i}: '{spec}' has no published field; only HySparse modes do"
    for i, spec in enumerate(schedule)
    if spec.mode == "dense" or spec.mode in PLAIN
  ]
  if foreign:
    raise ScheduleError("; ".join(foreign))
  return {
    "num_hidden_layers": len(schedule),
    "compress_ratios": [s.ratio for s in schedule] + [0] * draft_layers,
    "kv_source_layer_ids": list(schedule.kv_sources),
    "index_source_layer_ids": list(schedule.index_sources),
    "candidate_source_layer_id": (
      -1 if schedule.candidate_source is None else schedule.candidate_source
    ),
    "engram_layer_ids": list(schedule.engram_layers),
  }
