"""Models beside each other.

compare("configs/v41_flash.py", "deepseek-v3.json", context=131_072).plot()
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hysparse import config as config_lib
from hysparse.analysis import units
from hysparse.analysis.frames import frame, lines
from hysparse.analysis.table import Table, footprint
from hysparse.footprint.read import Source

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Tables of several models at one context; the first is what the others are divided by."""

  tables: tuple[Table, ...]

  @property
  def frame(self) -> pandas.DataFrame:
    return frame(self._rows(), "model")

  def _rows(self) -> list[dict[str, Any]]:
    first = self.tables[0]
    return [
      {
        "model": table.model.name,
        "precision": table.model.precision,
        "bytes_per_token": float(table.per_token),
        "bounded": table.bytes(lifetime="bounded") // (table.batch * table.replicas),
        "resident": table.tier("resident"),
        "times_the_first": table.tier("resident") / first.tier("resident"),
      }
      for table in self.tables
    ]

  def to_json(self) -> str:
    return json.dumps([table.to_dict() for table in self.tables], indent=2)

  def __str__(self) -> str:
    return lines(self._rows(), right=range(2, 6))

  __repr__ = __str__

  def _repr_html_(self) -> str:
    return self.frame.to_html(border=0, float_format="{:,.2f}".format)

  def plot(self) -> Plot:
    """Bytes a token, and bytes of one sequence against its context, to each model's longest."""
    from hysparse.analysis import look

    count = len(self.tables)
    figure = look.figure(10, max(3.6, 1.6 + 0.4 * count))
    left, right = figure.subplots(1, 2)
    names = [table.model.name for table in self.tables]
    sizes = [float(table.per_token) for table in self.tables]
    left.barh(range(count), sizes, color=look.LIGHT)
    for place, size in enumerate(sizes):
      left.text(size, place, f" {units.number(size)}", va="center", fontsize="small")
    left.set_yticks(range(count), names, fontsize="small")
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlim(min(filter(None, sizes), default=1) / 4, 8 * max(*sizes, 1))
    left.set_xlabel("bytes a token of context (logarithmic)")
    left.set_title("what each token adds", fontsize="medium")
    for table, style in zip(self.tables, look.models(count), strict=True):
      longest = table.model.max_positions or look.CONTEXTS[-1]
      contexts = sorted(
        {*(n for n in look.CONTEXTS if n <= longest), min(longest, look.CONTEXTS[-1])}
      )
      sizes = [table.at(n).tier("resident") / (table.batch * table.replicas) for n in contexts]
      right.plot(contexts, sizes, markersize=4.5, label=table.model.name, **style)
    look.context_axis(right, look.CONTEXTS)
    right.set_yscale("log")
    right.set_ylim(top=right.get_ylim()[1] * 30)  # room for the legend
    look.byte_axis(right)
    right.set_ylabel("bytes of one sequence")
    right.set_title("to the longest context of each model", fontsize="medium")
    right.grid(alpha=0.3)
    right.legend(fontsize="x-small", loc="upper left", ncols=2)
    return look.Plot(figure)


def compare(*models: Source | Table, **arguments: Any) -> Comparison:
  """Tables of several models, or ready ones, at the shortest context of them.

  Args:
    arguments: of `table.footprint`, for all that are no tables; `precision` of another family does
      not fit ours: make those tables yourself.

  Raises:
    ConfigError: fewer than two models, or one that is not known.
  """
  if len(models) < 2:
    raise config_lib.ConfigError(f"compare: {len(models)} models given; must be two at least")
  tables = [m if isinstance(m, Table) else footprint(m, **arguments) for m in models]
  context = min(table.context for table in tables)
  return Comparison(tuple(table.at(context) for table in tables))


def tradeoff(points: Mapping[str, tuple[float, float]], x: str, y: str) -> Plot:
  """Named points of two quantities that should both be small; labels hold their units."""
  from matplotlib.ticker import FuncFormatter, NullFormatter

  from hysparse.analysis import look

  figure = look.figure(7.5, 4)
  axes = figure.subplots()
  for (name, at), style in zip(points.items(), look.models(len(points)), strict=True):
    axes.plot(*([value] for value in at), linestyle="", label=name, markersize=8, **style)
  axes.set_xscale("log")
  axes.set_yscale("log")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter(FuncFormatter(lambda value, _: units.number(value)))
    axis.set_minor_formatter(NullFormatter())
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.grid(alpha=0.3, which="both")
  figure.legend(fontsize="small", loc="outside right center")
  return look.Plot(figure)
