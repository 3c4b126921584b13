"""HySparse: language models whose KV cache is the design goal, in JAX.

Names resolve lazily, so that counting bytes never loads a model:

    from hysparse import Batch, create, forward, load_config
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
  "Batch": "hysparse.nn.batch:Batch",
  "allocate": "hysparse.cache.state:allocate",
  "Config": "hysparse.config:Config",
  "ConfigError": "hysparse.config:ConfigError",
  "Loaded": "hysparse.conversion.load:Loaded",
  "ModelConfig": "hysparse.config:ModelConfig",
  "Schedule": "hysparse.schedule:Schedule",
  "ScheduleError": "hysparse.schedule:ScheduleError",
  "create": "hysparse.nn.model:create",
  "draft": "hysparse.nn.model:draft",
  "encode_image": "hysparse.nn.vision:encode_image",
  "forward": "hysparse.nn.model:forward",
  "load": "hysparse.conversion.load:load",
  "load_config": "hysparse.config_file:load",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module 'hysparse' has no attribute '{name}'; it has {sorted(_HOME)}")
  module, attribute = _HOME[name].split(":")
  return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
  return __all__
