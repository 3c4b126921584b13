"""A table of bytes as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from hysparse.analysis import look, units

if TYPE_CHECKING:
  from hysparse.analysis.table import Table


def plot(table: Table) -> look.Plot:
  """Bytes a token by owner layer, and bytes of a sequence against its context."""
  figure = look.figure(10, 4)
  left, right = figure.subplots(1, 2)
  _by_layer(left, table)
  _by_context(right, table)
  figure.suptitle(f"{table.model.name} ({table.model.precision})")
  return look.Plot(figure)


def _by_layer(axes: Axes, table: Table) -> None:
  layers = len(table.model.layers)
  bottom = [0.0] * layers
  for component in _names(table, "global"):
    heights = [0.0] * layers
    for line in table.lines:
      if line.component == component:
        heights[line.layer] += float(line.per_token)
    axes.bar(
      range(layers),
      heights,
      bottom=bottom,
      color=look.colour(component),
      label=component,
      width=0.9,
    )
    bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
  axes.set_xlabel("owner layer")
  axes.set_ylabel("bytes a token of context")
  axes.set_xlim(-0.7, layers - 0.3)
  axes.set_ylim(0, 1.25 * max(*bottom, 1))
  axes.set_title(f"{units.number(float(table.per_token))} bytes a token", fontsize="medium")
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize="small")


def _by_context(axes: Axes, table: Table) -> None:
  longest = table.model.max_positions
  contexts = [n for n in look.CONTEXTS if longest is None or n <= longest] or [longest]
  tables = [table.at(n) for n in contexts]
  totals = [t.tier("resident") / (t.batch * t.replicas) for t in tables]
  axes.plot(contexts, totals, color=look.BLACK, linewidth=2.5, alpha=0.35, label="resident")
  for component in _names(table, "global", "bounded"):
    each = [t.bytes(component=component) / (t.batch * t.replicas) for t in tables]
    if max(each) > min(totals) / 1000:  # what nobody would see stays out of the legend
      # Windows of both sides have equal sizes: the dashes let the one below be seen.
      style = "o--" if component == "window_decoder" else "o-"
      axes.plot(
        contexts, each, style, color=look.colour(component), label=component, markersize=3.5
      )
  even = _crossing(table)
  if even is not None and contexts[0] < even < contexts[-1]:
    label = f"half and half: {even:,.0f} tokens"
    axes.axvline(even, color=look.BLACK, linestyle=":", linewidth=1, label=label)
  look.context_axis(axes, contexts)
  axes.set_yscale("log")
  axes.set_ylim(top=30 * max(totals))  # room for the legend
  look.byte_axis(axes)
  axes.set_ylabel("bytes of one sequence")
  axes.set_title("what grows and what does not", fontsize="medium")
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small", loc="upper left", ncols=2)


def _crossing(table: Table) -> float | None:
  """Tokens at which the global cache is as large as all that is bounded."""
  bounded = table.bytes(lifetime="bounded") / (table.batch * table.replicas)
  return bounded / float(table.per_token) if table.per_token and bounded else None


def _names(table: Table, *lifetimes: str) -> Sequence[str]:
  return list(dict.fromkeys(line.component for line in table.lines if line.lifetime in lifetimes))
