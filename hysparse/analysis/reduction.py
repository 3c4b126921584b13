"""Where a cache's bytes went: from one entry a head, layer and token to what the model keeps.

    waterfall("configs/v41_flash.py").plot()

Four things divide the bytes a token, in this order:

- entry size: fewer key heads, or one latent for keys and values (an indexer's key counts in);
- sequence: a window instead of the whole context, one entry for several tokens;
- layer: layers that read another's entries keep none;
- precision: from 16 bits a value to the format that is stored, scales included.

Each factor is what remains of the step before; their product is the whole ratio.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hysparse.analysis import units
from hysparse.analysis.frames import frame, lines
from hysparse.footprint.kept import Kept, Reads
from hysparse.footprint.read import Precision, Source, read

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot

_WIDE = 2  # bytes of a value in BF16, in which every step but the last is counted


@dataclasses.dataclass(frozen=True)
class Step:
  """Bytes a token once everything up to this step is done."""

  name: str
  what: str
  per_token: Fraction


@dataclasses.dataclass(frozen=True)
class Waterfall:
  """From multi-head attention to a model, step by step."""

  model: Kept
  steps: tuple[Step, ...]

  @property
  def factors(self) -> dict[str, Fraction | None]:
    """By what each step divides the one before; None where nothing is left."""
    pairs = zip(self.steps, self.steps[1:], strict=False)
    return {b.name: a.per_token / b.per_token if b.per_token else None for a, b in pairs}

  @property
  def frame(self) -> pandas.DataFrame:
    return frame(self._rows(), "step")

  def _rows(self) -> list[dict[str, Any]]:
    factors = {name: float(factor) for name, factor in self.factors.items() if factor}
    return [
      {
        "step": step.name,
        "what": step.what,
        "bytes_per_token": float(step.per_token),
        "divides_by": factors.get(step.name, float("nan")),
      }
      for step in self.steps
    ]

  def __str__(self) -> str:
    return lines(self._rows(), right=(2, 3))

  __repr__ = __str__

  def _repr_html_(self) -> str:
    return self.frame.to_html(border=0, na_rep="", float_format="{:,.2f}".format)

  def plot(self) -> Plot:
    """A bar a step, on a logarithmic axis, with the factor between them."""
    from hysparse.analysis import look

    figure = look.figure(8.5, 3.6)
    axes = figure.subplots()
    shown = [step for step in self.steps if step.per_token]
    sizes = [float(step.per_token) for step in shown]
    colours = [look.GREY, *[look.SKY] * (len(shown) - 2), look.BLUE][: len(shown)]
    places = range(len(shown))
    axes.barh(places, sizes, color=colours)
    factors = self.factors
    for place, step, size in zip(places, shown, sizes, strict=True):
      factor = factors.get(step.name)
      divided = f"   (÷ {units.number(float(factor))})" if factor else ""
      axes.text(size * 1.1, place, f"{units.number(size)}{divided}", va="center", fontsize="small")
    names = [f"{step.name}\n{step.what}" for step in shown]
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 3, max(sizes) * 6)
    axes.set_xlabel("bytes a token of context (logarithmic)")
    whole = sizes[0] / sizes[-1]
    axes.set_title(f"{self.model.name}: {units.number(whole)} times smaller", fontsize="medium")
    return look.Plot(figure)


def waterfall(config_or_path: Source, *, precision: Precision = None) -> Waterfall:
  """The steps from multi-head attention, as many layers and heads in BF16, to a model.

  Arguments as in `table.footprint`.

  Raises:
    ConfigError: a model that is not known.
  """
  model = read(config_or_path, precision=precision)
  layers = model.layers
  owned = [layer for layer in layers if layer.owns]
  windows = sum(not layer.rate for layer in layers)
  ratios = sorted({layer.rate.denominator for layer in layers if layer.rate})
  entries = f"an entry per {' or '.join(map(str, ratios))} tokens" if ratios != [1] else ""
  sequence = [f"{windows} layers see a window only" if windows else "", entries]
  owners = sum(layer.owns and bool(layer.rate) for layer in layers)
  whole = sum(layer.channels * layer.rate for layer in layers)
  steps = (
    Step(
      "multi-head attention",
      f"{len(layers)} layers, keys and values of all heads: {model.head_channels:,} channels, BF16",
      Fraction(_WIDE * len(layers) * model.head_channels),
    ),
    Step(
      "entry size", f"{_channels(layers)} channels an entry",
      Fraction(_WIDE * sum(layer.channels for layer in layers)),
    ),
    Step("sequence", ", ".join(filter(None, sequence)) or "an entry a token", _WIDE * whole),
    Step(
      "layer", f"{owners} of {len(layers)} layers keep entries",
      _WIDE * sum((layer.channels * layer.rate for layer in owned), Fraction(0)),
    ),
    Step("precision", model.precision, model.per_token),
  )  # fmt: skip
  return Waterfall(model, steps)


def _channels(layers: Sequence[Reads]) -> str:
  """640, or 512 in 2 layers and 640 in 38."""
  counts = Counter(layer.channels for layer in layers)
  if len(counts) == 1:
    return f"{layers[0].channels:,}"
  return " and ".join(f"{channels:,} in {count} layers" for channels, count in counts.items())
