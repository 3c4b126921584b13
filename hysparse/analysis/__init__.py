"""A notebook's view of what a cache costs and what is in it.

    from hysparse import analysis

    analysis.footprint("configs/v41_flash.py", context=1_048_576).plot()

Names resolve when they are used, so that counting bytes loads no model. No module is called like a
function: it would take its place once it is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
  "capacity": "sessions",
  "compare": "comparison",
  "dial": "precision",
  "footprint": "table",
  "layer_tokens": "flop_table",
  "logit_change": "precision",
  "selection": "selected",
  "tradeoff": "comparison",
  "verify": "measured",
  "waterfall": "reduction",
  "work": "flop_table",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module 'hysparse.analysis' has no attribute '{name}'; it has {__all__}")
  return getattr(importlib.import_module(f"hysparse.analysis.{_HOME[name]}"), name)


def __dir__() -> list[str]:
  return __all__
