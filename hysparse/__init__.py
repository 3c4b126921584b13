"""HySparse: language models whose KV cache is the design goal, in JAX.

Names resolve lazily, so that counting bytes never loads a model:

    from hysparse import Config, Batch, create, forward, footprint
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
  "Batch": "hysparse.nn.batch",
  "Config": "hysparse.config",
  "ConfigError": "hysparse.config",
  "ModelConfig": "hysparse.config",
  "Schedule": "hysparse.schedule",
  "ScheduleError": "hysparse.schedule",
  "create": "hysparse.nn.model",
  "forward": "hysparse.nn.model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module 'hysparse' has no attribute '{name}'; it has {sorted(_HOME)}")
  return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
  return __all__
