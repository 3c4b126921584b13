"""The picture of a precision dial (precision.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hysparse.analysis import look

if TYPE_CHECKING:
  from hysparse.analysis.precision import Dial

_MARKERS = {"mxfp4": "v", "fp4": "o", "fp8": "D", "bf16": "s"}  # f32 rounds nothing


def dial(shown: Dial) -> look.Plot:
  figure = look.figure(10, 3.8)
  left, right = figure.subplots(1, 2, sharex=True)
  colours = {"main_kv": look.colour("main_kv"), "index_k": look.colour("index_keys")}
  colours["window_kv"] = look.colour("window")
  wide = 5.0  # lines that lie on each other get narrower, so that all are seen
  for component, colour in colours.items():
    points = sorted((p for p in shown.points if p.component == component), key=lambda p: p.bytes)
    points = [p for p in points if p.format in _MARKERS]
    for axes, name in ((left, "error"), (right, "effect")):
      heights = [100 * getattr(p, name) for p in points]
      axes.plot([p.bytes for p in points], heights, color=colour, linewidth=wide)
      for p, height in zip(points, heights, strict=True):
        axes.plot(p.bytes, height, _MARKERS[p.format], color=colour, markersize=wide + 4)
        if p.released:
          ring = {"markersize": 17, "markeredgewidth": 2, "fillstyle": "none"}
          axes.plot(p.bytes, height, "o", color=colour, **ring)
    if points:
      left.plot([], [], color=colour, linewidth=3, label=component)
    wide -= 1.75
  left.set_ylabel("relative error of the values (%)")
  right.set_ylabel("output moves, or entries change (%)")
  for axes in (left, right):
    axes.set_xscale("log", base=2)
    ticks = sorted({p.bytes for p in shown.points if p.format in ("fp4", "fp8", "bf16")})
    axes.set_xticks(ticks, list(map(str, ticks)), rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("bytes an entry")
    axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
  left.plot([], [], "o", color=look.BLACK, markersize=12, fillstyle="none", label="released")
  left.legend(fontsize="small", loc="upper right")
  for format in dict.fromkeys(p.format for p in shown.points if p.format in _MARKERS):
    right.plot([], [], _MARKERS[format], color=look.BLACK, label=format)
  right.legend(fontsize="small", loc="upper right")
  return look.Plot(figure)
