"""HySparse: language models whose KV cache is the design goal, in JAX.

Names resolve lazily, so that counting bytes never loads a model:

    from hysparse import Batch, create, forward, load_config
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
  "allocate": "hysparse.cache.allocate:allocate",
  "Batch": "hysparse.nn.batch:Batch",
  "Config": "hysparse.config:Config",
  "ConfigError": "hysparse.config:ConfigError",
  "create": "hysparse.nn.model:create",
  "draft": "hysparse.nn.model:draft",
  "encode_image": "hysparse.nn.vision:encode_image",
  "Engine": "hysparse.inference.engine:Engine",
  "forward": "hysparse.nn.model:forward",
  "generate": "hysparse.inference.generate:generate",
  "load": "hysparse.conversion.load:load",
  "load_config": "hysparse.config_file:load",
  "Loaded": "hysparse.conversion.load:Loaded",
  "ModelConfig": "hysparse.config:ModelConfig",
  "Placement": "hysparse.sharding:Placement",
  "Request": "hysparse.inference.requests:Request",
  "Sampling": "hysparse.inference.sampling:Sampling",
  "Schedule": "hysparse.schedule:Schedule",
  "ScheduleError": "hysparse.schedule:ScheduleError",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module 'hysparse' has no attribute '{name}'; it has {sorted(_HOME)}")
  module, attribute = _HOME[name].split(":")
  return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
  return __all__
