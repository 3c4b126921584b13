"""Which parameter gets which update, and the learning-rate curve.

The groups are those of the report, by name. Today every group is AdamW; a group of its own update
(Muon, Sinkhorn balancing) replaces one entry of `build`, nothing else.

Parameters are flat dictionaries `{"runs/0/attn/wq_a/weight": array}` (`checkpoints.named`); the
leading axis of everything below `runs/` stacks the layers of a run.

Source: arXiv 2609.19969, training section, for the groups and the weight decay; AdamW on all of
them is ours for now.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import optax
from jaxtyping import Array

from hysparse.config import OptimConfig

Named = Mapping[str, Array]


class UnknownParameterError(ValueError):
  """A parameter that no group, or more than one, lays claim to; names it."""


@dataclasses.dataclass(frozen=True)
class Group:
  """Parameters that share an update.

  Attributes:
    name: as printed and as stored in the optimizer state.
    patterns: names, where `*` stands for one part of a path and (a|b) for either.
    decayed: whether `optim.weight_decay` applies.
    lr_field: field of OptimConfig that multiplies the learning rate, or None.
    frozen: never changed.
  """

  name: str
  patterns: tuple[str, ...]
  decayed: bool = False
  lr_field: str | None = None
  frozen: bool = False

  def holds(self, name: str) -> bool:
    return any(re.fullmatch(p.replace("*", "[^/]+"), name) for p in self.patterns)


GROUPS = (
  Group(
    "matrices",
    (
      "runs/*/attn/(wq_a|wv)/weight",
      "runs/*/attn/output/(wo_a|wo_b)/weight",
      "runs/*/attn/compressor/wgate/weight",
      "runs/*/attn/indexer/weights_proj/weight",
      "runs/*/ffn/gate/weight",
      "runs/*/ffn/shared/(w1|w2|w3)/weight",
      "runs/*/engram/wkv/weight",
    ),
    decayed=True,
  ),
  # Apart from the other matrices because the report orthogonalises them head by head.
  Group(
    "query and key",
    (
      "runs/*/attn/(wq_b|wkv|wk)/weight",
      "runs/*/attn/compressor/wkv/weight",
      "runs/*/attn/indexer/wq_b/weight",
      "runs/*/attn/index_keys/wk/weight",
    ),
    decayed=True,
  ),
  Group("experts", ("runs/*/ffn/experts/(w1|w2|w3)",), decayed=True),
  Group("engram tables", ("runs/*/engram/table",), lr_field="engram_lr"),
  Group("embedding", ("embed/weight",)),
  Group("head", ("head/weight",)),
  Group(
    "norms",
    (
      "norm/weight",
      "runs/*/(attn_norm|ffn_norm)/weight",
      "runs/*/attn/(q_norm|kv_norm)/weight",
      "runs/*/attn/compressor/norm/weight",
      "runs/*/attn/index_keys/k_norm/weight",
      "runs/*/engram/(q_weight|k_weight)",
    ),
    decayed=True,
  ),
  Group("biases, sinks, streams", ("runs/*/attn/sink", "runs/*/(hc_attn|hc_ffn)/(fn|base|scale)")),
  # The language loss does not reach them, so decay would be all that they get.
  Group("drafts, vision", ("(drafts|vision|aligner|image)/.+",), frozen=True),
)


def group_of(name: str) -> Group:
  """The group of one parameter.

  Raises:
    UnknownParameterError: no group or several hold it.
  """
  found = [group for group in GROUPS if group.holds(name)]
  if len(found) != 1:
    claims = " and ".join(f"'{group.name}'" for group in found) or "no group"
    raise UnknownParameterError(f"{name}: belongs to {claims} of training/optimizer.py, not to one")
  return found[0]


def learning_rate(optim: OptimConfig, steps: int) -> optax.Schedule:
  """The curve step -> learning rate of the parameters without a factor; steps count from 0.

  Linear to `lr`, which the last warm-up step reaches; constant to `constant_share` of `steps`;
  cosine to `lr * final_lr` at `decay_share`; constant from there on. A warm-up longer than a share
  pushes what follows back.
  """
  warm = optim.warmup_steps
  constant_end = max(warm, round(optim.constant_share * steps))
  decay = max(1, round(optim.decay_share * steps) - constant_end)
  warmup = optax.linear_schedule(optim.lr / max(1, warm), optim.lr, warm - 1)
  cosine = optax.cosine_decay_schedule(optim.lr, decay, alpha=optim.final_lr)
  return optax.join_schedules(
    [warmup, optax.constant_schedule(optim.lr), cosine], [warm, constant_end]
  )


def build(optim: OptimConfig, steps: int, params: Iterable[str]) -> optax.GradientTransformation:
  """The update of a flat dictionary with these names: clipped by global norm, then by group.

  Raises:
    UnknownParameterError: a name that does not belong to exactly one group.
  """
  labels = {name: group_of(name).name for name in params}

  def curve(group: Group) -> optax.Schedule:
    plain, factor = learning_rate(optim, steps), _factor(group, optim)
    return lambda step: plain(step) * factor

  updates = {
    group.name: optax.set_to_zero()
    if group.frozen
    else optax.adamw(
      curve(group),
      b1=optim.b1,
      b2=optim.b2,
      eps=optim.eps,
      weight_decay=optim.weight_decay if group.decayed else 0.0,
    )
    for group in GROUPS
    if group.name in labels.values()
  }
  clip = optax.clip_by_global_norm(optim.clip_norm) if optim.clip_norm else optax.identity()
  return optax.chain(clip, optax.partition(updates, labels))


def describe(optim: OptimConfig, params: Named) -> str:
  """A table: every parameter (runs folded together), its group, its update and its size."""
  rows: dict[tuple[str, Group], list[int]] = {}
  for name, array in params.items():
    folded = re.sub(r"^runs/\d+/", "runs/*/", name)
    rows.setdefault((folded, group_of(name)), []).append(array.size)
  lines = [("group", "update", "parameter", "arrays", "values")]
  for group in GROUPS:
    update = f"AdamW, decay {optim.weight_decay if group.decayed else 0:g}"
    if group.frozen:
      update = "none"
    if group.lr_field:
      update += f", lr x{_factor(group, optim):g}"
    for (folded, owner), sizes in rows.items():
      if owner is group:
        lines.append((group.name, update, folded, str(len(sizes)), f"{sum(sizes):,}"))
  total = sum(array.size for array in params.values())
  lines.append(("all", "", "", str(len(params)), f"{total:,}"))
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  row = "  ".join([f"{{:<{w}}}" for w in widths[:3]] + [f"{{:>{w}}}" for w in widths[3:]])
  return "\n".join(row.format(*line) for line in lines)


def _factor(group: Group, optim: OptimConfig) -> float:
  return getattr(optim, group.lr_field) if group.lr_field else 1.0
