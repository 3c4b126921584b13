"""The loss curve of a workdir as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision, and by lightness in print.
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_SMOOTHED_SHARE = 0.02  # of all steps, in each average of the smoothed loss


def save_loss_plot(
  path: pathlib.Path, records: Iterable[Mapping[str, Any]], baselines: Mapping[str, float]
) -> None:
  """Draws the training loss above the held-out bits per byte, over steps.

  Args:
    path: a .png file, written whole or not at all.
    records: of training/metrics.py.
    baselines: name -> bits per byte, drawn as lines across.
  """
  records = list(records)
  losses = np.asarray([(r["step"], r["loss"]) for r in records if "loss" in r]).reshape(-1, 2)
  held = [(r["step"], r["eval"]["bits_per_byte"]) for r in records if "eval" in r]

  figure = Figure(figsize=(8, 6.5), layout="constrained")
  FigureCanvasAgg(figure)
  above, below = figure.subplots(2, 1, sharex=True)
  width = max(1, round(_SMOOTHED_SHARE * len(losses)))
  faint = {"alpha": 0.35, "linewidth": 0.8} if width > 1 else {}
  above.plot(*losses.T, color=_BLUE, label="each step", **faint)
  if width > 1:
    smooth = np.convolve(losses[:, 1], np.ones(width) / width, mode="valid")
    above.plot(losses[width - 1 :, 0], smooth, color=_BLUE, label=f"mean of {width} steps")
  above.set_ylabel("training loss, all terms (nats)")
  below.plot(*np.asarray(held).reshape(-1, 2).T, "o-", color=_ORANGE, label="this model")
  styles = zip((_GREEN, _PURPLE), ("--", ":"), strict=True)
  for (name, value), (colour, style) in zip(baselines.items(), styles, strict=False):
    below.axhline(value, color=colour, linestyle=style, label=f"{name} ({value:.2f})")
  below.set_ylabel("held-out text (bits per byte)")
  below.set_xlabel("step")
  for axes in (above, below):
    axes.grid(alpha=0.3)
    axes.legend()

  temporary = path.with_name(f".{path.stem}.tmp.png")
  figure.savefig(temporary, dpi=150)
  temporary.replace(path)
