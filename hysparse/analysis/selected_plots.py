"""Pictures of what a model selected (selected.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm

from hysparse.analysis import look

if TYPE_CHECKING:
  from hysparse.analysis.selected import Selection

_MASS = {"selected entries": look.BLUE, "window": look.GREEN, "sink": look.GREY}


def selection_map(shown: Selection, bins: int) -> look.Plot:
  """A panel a layer: how often queries at a position select tokens at another."""
  layers = list(shown.chosen.values())
  if not layers:
    return _nothing("no layer of this schedule selects entries")
  columns = min(len(layers), 4)
  rows = -(-len(layers) // columns)
  figure = look.figure(2.6 * columns + 0.8, 2.7 * rows + 0.3)
  panels = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel()
  length = len(shown.tokens_S)
  edges = np.linspace(0, length, min(bins, length) + 1)
  image = None
  for axes, chosen in zip(panels, layers, strict=False):
    query, place = np.nonzero(chosen.ids_SxK >= 0)
    at = chosen.ids_SxK[query, place] * chosen.ratio
    counts, *_ = np.histogram2d(query, at, bins=(edges, edges))
    # Selections of a cell, as a share of the (query, entry) pairs that are in it.
    pairs = np.diff(edges)[:, None] * np.diff(edges)[None] / chosen.ratio
    shares = np.ma.masked_equal(counts / pairs, 0)
    image = axes.pcolormesh(edges, edges, shares, norm=LogNorm(0.01, 1), cmap="viridis")
    axes.set_title(f"layer {chosen.layer}: {chosen.mode}", fontsize="small")
    axes.invert_yaxis()
  for axes in panels[len(layers) :]:
    axes.remove()
  figure.supxlabel("position of the entry (tokens)", fontsize="medium")
  figure.supylabel("position of the query (tokens)", fontsize="medium")
  bar = figure.colorbar(image, ax=panels[: len(layers)].tolist())
  bar.set_label("share selected (logarithmic)")
  return look.Plot(figure)


def overlap(shown: Selection) -> look.Plot:
  values, names = shown.overlap, [f"{c.layer}: {c.mode}" for c in shown.chosen.values()]
  if not names:
    return _nothing("no layer of this schedule selects entries")
  side = 2.2 + 0.75 * len(names)
  figure = look.figure(side + 1.2, side)
  axes = figure.subplots()
  image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis")
  for i, j in np.ndindex(values.shape):
    text = "-" if np.isnan(values[i, j]) else f"{values[i, j]:.2f}"
    shade = "white" if np.isnan(values[i, j]) or values[i, j] < 0.6 else "black"
    axes.text(j, i, text, ha="center", va="center", color=shade, fontsize="small")
  axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
  axes.set_yticks(range(len(names)), names)
  axes.set_xlabel("selecting layer")
  axes.set_ylabel("selecting layer")
  figure.colorbar(image, ax=axes, label="tokens selected by both (share)")
  return look.Plot(figure)


def recall(shown: Selection) -> look.Plot:
  rows = [row for row in shown.rows() if row["queries"]]
  if not rows:
    return _nothing("no query of this prompt sees enough entries to choose from")
  figure = look.figure(2.5 + 1.3 * len(rows), 3.6)
  axes = figure.subplots()
  bars = (
    ("recall", "selected by the indexer", look.ORANGE),
    ("random", "random selection", look.LIGHT),
    ("pool_recall", "inside the candidate pool", look.BLACK),
  )
  for place, (name, label, colour) in enumerate(bars):
    heights = [row[name] for row in rows]
    if not np.all(np.isnan(heights)):
      axes.bar(np.arange(len(rows)) + 0.27 * (place - 1), heights, 0.25, color=colour, label=label)
  names = [f"{row['layer']}: {row['mode']}" for row in rows]
  axes.set_xticks(range(len(rows)), names)
  axes.set_xlabel("selecting layer")
  axes.set_ylabel("share of the wanted entries")
  axes.set_ylim(0, 1.35)
  axes.set_yticks(np.linspace(0, 1, 6))
  axes.legend(fontsize="small", loc="upper left", ncols=3)
  axes.set_axisbelow(True)
  axes.grid(axis="y", alpha=0.3)
  return look.Plot(figure)


def gates(shown: Selection, first: int, count: int) -> look.Plot:
  if not shown.gates:
    return _nothing("this model has no Engram layer")
  chosen = slice(first, min(first + count, len(shown.tokens_S)))
  values = np.concatenate([gate[chosen].T for gate in shown.gates.values()])
  names = [f"layer {n}, stream {m}" for n, g in shown.gates.items() for m in range(g.shape[1])]
  figure = look.figure(10, 1.6 + 0.3 * len(names))
  axes = figure.subplots()
  image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
  axes.set_yticks(range(len(names)), names, fontsize="small")
  places = range(values.shape[1])
  if shown.texts is None:
    axes.set_xlabel("position (tokens)")
    axes.set_xticks(places[::8], [first + n for n in places[::8]])
  else:
    words = [repr(text)[1:-1].replace("$", r"\$") for text in shown.texts[chosen]]
    axes.set_xticks(places, words, rotation=90, fontsize="x-small", family="monospace")
    axes.set_xlabel(f"tokens from position {first}")
  figure.colorbar(image, ax=axes, label="gate (0 shut, 1 open)")
  return look.Plot(figure)


def experts(shown: Selection) -> look.Plot:
  load = shown.load
  even = np.maximum(load.sum(1, keepdims=True), 1) / load.shape[1]
  figure = look.figure(min(12.0, 3 + 0.35 * load.shape[1]), 1.6 + 0.28 * len(load))
  axes = figure.subplots()
  image = axes.imshow(load / even, cmap="viridis", vmin=0, aspect="auto")
  axes.set_xlabel("expert")
  axes.set_ylabel("layer")
  axes.set_yticks(range(len(load)), list(shown.experts))
  figure.colorbar(image, ax=axes, label="load (1: even share)")
  return look.Plot(figure)


def mass(shown: Selection) -> look.Plot:
  if not shown.mass:
    return _nothing("no layer of this schedule attends to selected entries")
  figure = look.figure(max(6.0, 2.5 + 0.5 * len(shown.mass)), 3.4)
  axes = figure.subplots()
  places, bottom = np.arange(len(shown.mass)), np.zeros(len(shown.mass))
  for i, (name, colour) in enumerate(_MASS.items()):
    heights = np.array([values[:, i].mean() for values in shown.mass.values()])
    axes.bar(places, heights, bottom=bottom, color=colour, label=name, width=0.8)
    bottom += heights
  axes.set_xticks(places, [f"{n}: {shown.config.layers[n]}" for n in shown.mass],
                  rotation=30, ha="right", fontsize="small")  # fmt: skip
  axes.set_xlabel("layer")
  axes.set_ylabel("attention probability (mean)")
  axes.set_ylim(0, 1.25)
  axes.legend(fontsize="small", loc="upper left", ncols=3)
  return look.Plot(figure)


def _nothing(why: str) -> look.Plot:
  """A picture that says why there is none."""
  figure = look.figure(5, 0.8)
  figure.text(0.5, 0.5, why, ha="center", va="center")
  return look.Plot(figure)
