"""How every picture of the analysis looks: one colour a component, a figure a notebook can show.

Colours are Okabe and Ito's, told apart with every kind of colour vision.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hysparse.analysis import units

BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILION, PURPLE, YELLOW, BLACK, GREY = "#D55E00", "#CC79A7", "#F0E442", "#000000", "#999999"
LIGHT, LIGHTER = "#BBBBBB", "#DDDDDD"  # of what is no component, like GREY

COMPONENTS = {
  "main_kv": BLUE,
  "index_keys": ORANGE,
  "plain_kv": VERMILION,
  "window_encoder": GREEN,
  "window_decoder": SKY,
  "window_draft": PURPLE,
  "window": GREEN,
  "partial_group": YELLOW,
  "engram_history": BLACK,
}  # the rest (bookkeeping, scratch) is grey

CONTEXTS = tuple(1 << power for power in range(10, 21, 2))  # of lines against the context

_MARKERS = "osD^vPX"
_DPI = 110


class Plot:
  """A figure that shows itself in a notebook and saves itself whole or not at all."""

  def __init__(self, figure: Figure):
    self.figure = figure

  def _repr_png_(self) -> bytes:
    buffer = io.BytesIO()
    self.figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()

  def save(self, path: str | os.PathLike) -> None:
    """Writes a .png, .svg or .pdf; the file appears when all of it is written."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
      self.figure.savefig(temporary, dpi=_DPI)
      temporary.replace(path)
    finally:
      temporary.unlink(missing_ok=True)


def figure(width: float = 8.0, height: float = 4.0) -> Figure:
  """An empty one, in inches, that no global state holds."""
  made = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(made)
  return made


def colour(component: str) -> str:
  """Of a component of the cache; the same in every picture."""
  return COMPONENTS.get(component, GREY)


def models(count: int) -> list[dict[str, str]]:
  """Colour and marker for each of several models, which are no components: dark to light."""
  shades = colormaps["viridis"](np.linspace(0.0, 0.9, count))
  return [{"color": to_hex(s), "marker": _MARKERS[i % len(_MARKERS)]} for i, s in enumerate(shades)]


def byte_axis(axes: Axes) -> None:
  """Ticks of the upright axis as sizes."""
  axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.size(value)))


def context_axis(axes: Axes, contexts: Sequence[int]) -> None:
  """A logarithmic axis of context lengths, each of them with a tick."""
  axes.set_xscale("log", base=2)
  axes.set_xticks(list(contexts), [units.tokens(n) for n in contexts])
  axes.minorticks_off()
  axes.set_xlabel("context (tokens)")
