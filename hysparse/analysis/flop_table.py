"""FLOPs per token against the context, and parameters, of our models.

Low precision as the report counts it (arXiv 2609.19969): a product costs by its wider operand,
BF16 1, FP8 1/2, FP4 1/4. Linear layers with FP8 inputs and weights and the experts (FP8 inputs,
FP4 weights) cost a half, the indexer's scores what its keys' format says; attention itself, the
output's first matrix (its input is BF16), router, compressor, streams and the head cost one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hysparse import config as config_lib
from hysparse import parameters
from hysparse.analysis import units
from hysparse.analysis.frames import frame
from hysparse.flops import Dot, forward_dots
from hysparse.footprint.read import Source, read

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot

CONTEXTS = tuple(1 << power for power in range(12, 21, 2))

_FORMAT_COST = {"fp4": 0.25, "mxfp4": 0.25, "fp8": 0.5, "bf16": 1.0, "f32": 1.0}
_FP8 = {("attention", name) for name in ("wq_a", "wq_b", "wkv", "wo_b")}
_FP8 |= {("engram", "wkv"), ("indexer", "wq_b")}

# Parts that belong together in a picture, bottom first.
_GROUPS = {
  "experts": ("experts", "router"),
  "attention matrices": ("attention", "compressor"),
  "attention": ("window_attention", "selected_attention", "dense_attention"),
  "indexer": ("indexer",),
  "the rest": ("engram", "streams", "head"),
}


def cost(dot: Dot, config: config_lib.ModelConfig) -> float:
  """What one FLOP of a product costs, BF16 being 1."""
  if dot.part == "experts" or (dot.part, dot.name) in _FP8:
    return _FORMAT_COST["fp8"]
  if (dot.part, dot.name) == ("indexer", "scores"):
    return _FORMAT_COST[config.index_k]
  return 1.0


@dataclasses.dataclass(frozen=True)
class Work:
  """FLOPs a token.

  Attributes:
    model: its name.
    phase: "decode": one token behind so many; "prefill": the mean over a prompt of so many.
    weighted: low precision counts less.
    flops: by context, then by part of the model.
    parameters: "total" and what a token of either phase touches.
  """

  model: str
  phase: str
  weighted: bool
  flops: dict[int, dict[str, float]]
  parameters: dict[str, int]

  @property
  def totals(self) -> dict[int, float]:
    return {context: sum(parts.values()) for context, parts in self.flops.items()}

  @property
  def growth(self) -> float:
    """FLOPs a token at the longest context over those at the shortest."""
    totals = list(self.totals.values())
    return totals[-1] / totals[0]

  @property
  def frame(self) -> pandas.DataFrame:
    parts = dict.fromkeys(part for counted in self.flops.values() for part in counted)
    rows = [{"part": p} | {n: f.get(p, 0.0) for n, f in self.flops.items()} for p in parts]
    return frame([*rows, {"part": "total", **self.totals}], "part").rename_axis("context", axis=1)

  def __str__(self) -> str:
    return (self.frame / 1e9).to_string(float_format="{:,.3f} G".format)

  __repr__ = __str__

  def _repr_html_(self) -> str:
    return (self.frame / 1e9).to_html(border=0, float_format="{:,.3f} G".format)

  def plot(self) -> Plot:
    """GFLOPs a token against the context, in layers."""
    from hysparse.analysis import look

    figure = look.figure(7.5, 3.8)
    axes = figure.subplots()
    contexts = list(self.flops)
    grouped = [
      [sum(self.flops[n].get(part, 0.0) for part in parts) / 1e9 for n in contexts]
      for parts in _GROUPS.values()
    ]
    colours = (look.GREY, look.LIGHT, look.BLUE, look.ORANGE, look.LIGHTER)
    axes.stackplot(contexts, grouped, labels=list(_GROUPS), colors=colours)
    look.context_axis(axes, contexts)
    axes.set_xlim(contexts[0], contexts[-1])
    axes.set_ylim(0, 1.45 * max(self.totals.values()) / 1e9)
    unit = "GFLOP a token" + (", low precision counted less" if self.weighted else "")
    axes.set_ylabel(unit, fontsize="small")
    first, last = units.tokens(contexts[0]), units.tokens(contexts[-1])
    title = f"{self.model}, {self.phase}: {self.growth:.2f} times from {first} to {last}"
    axes.set_title(title, fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize="small", loc="upper left", ncols=2)
    return look.Plot(figure)


def work(
  config_or_path: Source,
  *,
  contexts: Sequence[int] | None = None,
  phase: Literal["decode", "prefill"] = "decode",
  weighted: bool = True,
) -> Work:
  """Counts products of matrices (hysparse/flops.py), of all layers.

  Args:
    config_or_path: one of our models.
    contexts: tokens, the ones computed included; by default from 4,096 in steps of four.
    phase: see `Work.phase`.
    weighted: count low precision as the report does; else every FLOP is one.

  Raises:
    ConfigError: another family's model, or a context beyond its positions.
  """
  model = read(config_or_path)
  config = model.config
  if config is None:
    raise config_lib.ConfigError(f"work: {model.name} ({model.family}): FLOPs are of our models")
  longest = config.max_positions
  if not contexts:
    contexts = [n for n in CONTEXTS if n <= longest]
    contexts = contexts if len(contexts) > 1 else [max(1, longest // n) for n in (64, 16, 4, 1)]
  flops: dict[int, dict[str, float]] = {}
  for context in contexts:
    if not 1 <= context <= longest:
      raise config_lib.ConfigError(f"contexts: has {context}; must be in 1..{longest}")
    start = context - 1 if phase == "decode" else 0
    parts: dict[str, float] = {}
    for dot in forward_dots(config, context, start=start):
      each = dot.flops / (context - start) * (cost(dot, config) if weighted else 1.0)
      parts[dot.part] = parts.get(dot.part, 0.0) + each
    flops[context] = parts
  total = {"total": sum(parameters.parameters(config).values())}
  return Work(model.name, phase, weighted, flops, total | parameters.active_parameters(config))


def layer_tokens(config_or_path: Source, tokens: int, prefill: str = "all_layers") -> int:
  """Tokens that pass through a layer in the prefill of a prompt, summed over the layers.

  Args:
    prefill: "all_layers", or "replay": the decoder's layers see the last window only.

  Raises:
    ConfigError: a schedule that cannot replay, another family's model.
  """
  model = read(config_or_path)
  if model.config is None:
    raise config_lib.ConfigError(f"layer_tokens: {model.name} ({model.family}) is not ours")
  layers = model.config.layers
  if prefill == "all_layers":
    return tokens * len(layers)
  reason = layers.replay_unsupported_reason()
  if prefill != "replay" or reason:
    raise config_lib.ConfigError(f"prefill: {prefill!r} cannot be counted: {reason or 'unknown'}")
  decoder = len(layers) - layers.decoder_start
  return tokens * layers.decoder_start + min(tokens, model.config.window) * decoder
