"""Model families with keys and values of their own heads, from their config.json.

Counted are MHA, GQA and MQA, all layers or some of them with a sliding window, layers that share
another's keys. What a file leaves out is what transformers' config class of that family says; a
family, or a kind of layer, that is not here is refused by name.

Source: transformers, `configuration_*.py` of each family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from hysparse import config as config_lib
from hysparse.cache.layout import Component, Part
from hysparse.footprint.entry_formats import CacheFormat
from hysparse.footprint.fields import Fields
from hysparse.footprint.kept import Reads

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Family:
  """Where a family's config.json says what is counted.

  Attributes:
    layers, heads, width: names of the fields.
    kv_heads: of K and V heads; None: as many as heads (MHA). A function, if it is not one field.
    head_dim: the field; width / heads where it is missing.
    defaults: of fields that a file may leave out.
    window: which layers have a sliding window if the file does not list them (`layer_types`).
  """

  layers: str = "num_hidden_layers"
  heads: str = "num_attention_heads"
  width: str = "hidden_size"
  kv_heads: str | Callable[[Fields, int], int] | None = "num_key_value_heads"
  head_dim: str = "head_dim"
  defaults: Mapping[str, Any] | None = None
  window: Callable[[Fields, int], list[str]] | None = None


def _everywhere(fields: Fields, layers: int) -> list[str]:
  return [SLIDING if fields.get("sliding_window") else FULL] * layers


def _last_of(pattern: int, field: str | None = None) -> Callable[[Fields, int], list[str]]:
  """Every n-th layer is a full one."""

  def kinds(fields: Fields, layers: int) -> list[str]:
    every = fields.count(field, default=pattern) if field else pattern
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]

  return kinds


def _above(fields: Fields, layers: int) -> list[str]:
  """Qwen's: the layers from `max_window_layers` on, if windows are switched on at all."""
  if not (fields.get("use_sliding_window") and fields.get("sliding_window")):
    return [FULL] * layers
  first = fields.count("max_window_layers", least=0)
  return [SLIDING if i >= first else FULL for i in range(layers)]


def _falcon_heads(fields: Fields, heads: int) -> int:
  if fields.get("new_decoder_architecture"):
    return fields.count("num_kv_heads", default=heads)
  return 1 if fields.get("multi_query", True) else heads


def _bigcode_heads(fields: Fields, heads: int) -> int:
  return 1 if fields.get("multi_query", True) else heads


_GPT2 = Family("n_layer", "n_head", "n_embd", None)
_LLAMA, _QWEN = Family(), Family(window=_above)
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_GEMMA3 |= {"sliding_window": 4096, "hidden_size": 2304, "num_hidden_layers": 26}
FAMILIES: Mapping[str, Family] = MappingProxyType(
  {
    **dict.fromkeys(("llama", "stablelm", "phi", "olmo", "olmo2", "granite", "cohere"), _LLAMA),
    **dict.fromkeys(("granitemoe", "olmoe", "glm", "glm4", "glm4_moe", "seed_oss"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN),
    **dict.fromkeys(("phi3", "starcoder2", "phimoe"), Family(window=_everywhere)),
    "mistral": Family(
      defaults={"num_key_value_heads": 8, "sliding_window": 4096}, window=_everywhere
    ),
    "mixtral": Family(defaults={"num_key_value_heads": 8}, window=_everywhere),
    "gemma": Family(defaults={"head_dim": 256, "num_key_value_heads": 16}),
    "gemma2": Family(
      defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
      window=_last_of(2),
    ),
    "gemma3_text": Family(defaults=_GEMMA3, window=_last_of(6, "sliding_window_pattern")),
    "gemma3n_text": Family(
      defaults={"head_dim": 256, "num_key_value_heads": 2, "sliding_window": 512},
      window=_last_of(5),
    ),
    "cohere2": Family(
      defaults={"sliding_window": 4096}, window=_last_of(4, "sliding_window_pattern")
    ),
    "olmo3": Family(defaults={"sliding_window": 4096}, window=_last_of(4)),
    "gpt_oss": Family(
      defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
      window=_last_of(2),
    ),
    "falcon": Family(kv_heads=_falcon_heads),
    "gpt_bigcode": Family("n_layer", "n_head", "n_embd", _bigcode_heads),
    "gpt_neox": Family(kv_heads=None),
    "opt": Family(kv_heads=None),
    "bloom": Family("n_layer", "n_head", "hidden_size", None),
    "gpt2": _GPT2,
    "gptj": _GPT2,
  }
)


def components(
  family: Family, fields: Fields, format: CacheFormat
) -> tuple[list[Component], list[Reads], int]:
  """Components, reads of each layer, and channels of keys and values if all heads had their own.

  Raises:
    ConfigError: a field that is missing or does not fit.
  """
  fields = fields.with_defaults(family.defaults or {})
  layers, heads = fields.count(family.layers), fields.count(family.heads)
  kv_heads, dim = _kv_heads(family, fields, heads), _head_dim(family, fields, heads)
  kinds = _kinds(family, fields, layers)
  owners = layers - fields.count("num_kv_shared_layers", default=0, least=0)
  if owners < 1:
    raise config_lib.ConfigError(
      f"{fields.name}: num_kv_shared_layers: is {layers - owners}; must be below {layers}"
    )
  row = tuple(Part(name, (kv_heads, dim), format.dtype) for name in ("keys", "values"))
  full = tuple(i for i in range(owners) if kinds[i] == FULL)
  near = tuple(i for i in range(owners) if kinds[i] == SLIDING)
  found = []
  if full:
    found.append(Component("plain_kv", full, format.name, row, "global", Fraction(1)))
  if near:
    rows = fields.count("sliding_window")
    found.append(Component("window", near, format.name, row, "bounded", rows=rows))
  reads = [Reads(2 * kv_heads * dim, Fraction(kinds[i] == FULL), i < owners) for i in range(layers)]
  return found, reads, 2 * heads * dim


def _kv_heads(family: Family, fields: Fields, heads: int) -> int:
  if family.kv_heads is None:
    return heads
  if callable(family.kv_heads):
    return family.kv_heads(fields, heads)
  found = fields.count(family.kv_heads, default=heads)
  if heads % found:
    raise config_lib.ConfigError(
      f"{fields.name}: {family.kv_heads}: is {found}; must divide {family.heads} ({heads})"
    )
  return found


def _head_dim(family: Family, fields: Fields, heads: int) -> int:
  if fields.get(family.head_dim) is not None:
    return fields.count(family.head_dim)
  width = fields.count(family.width)
  if width % heads:
    raise config_lib.ConfigError(
      f"{fields.name}: {family.width}: is {width}, which {family.heads} ({heads}) does not divide;"
      " head_dim is missing"
    )
  return width // heads


def _kinds(family: Family, fields: Fields, layers: int) -> list[str]:
  """Full or sliding, for each layer."""
  listed = fields.get("layer_types")
  if listed is None:
    return family.window(fields, layers) if family.window else [FULL] * layers
  if not isinstance(listed, list) or len(listed) != layers:
    raise config_lib.ConfigError(
      f"{fields.name}: layer_types: must list {layers} layers ({family.layers})"
    )
  for i, kind in enumerate(listed):
    if kind not in (FULL, SLIDING):
      raise config_lib.ConfigError(
        f"{fields.name}: layer_types: layer {i} is {kind!r}; counted are {FULL} and {SLIDING}"
      )
  return listed
