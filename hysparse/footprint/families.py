"""Model families with keys and values of their own heads, from their config.json.

Counted are MHA, GQA and MQA, all layers or some of them with a sliding window, layers that share
another's keys. What a file leaves out is refused, except where `defaults` has what transformers'
config class of that family says. A family, or a kind of layer, that is not here is refused by name.

A window is a ring that is allocated whole, whatever the context; one that is no shorter than the
longest context is no window.

Source: transformers, `configuration_*.py` of each family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from hysparse import config as config_lib
from hysparse.cache.layout import Component, Part
from hysparse.footprint.entry_formats import CacheFormat
from hysparse.footprint.fields import Fields
from hysparse.footprint.kept import Reads

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Family:
  """How a family's config.json says what is counted.

  Attributes:
    kv_heads: "field": `num_key_value_heads`, null being all heads; "or_heads": the same, and all
      heads where it is missing; "heads": all (MHA). A function, if it is not one field.
    defaults: of fields that a file may leave out.
    window: which layers have a sliding window if the file does not list them (`layer_types`).
    needs_head_dim: a missing `head_dim` is not width / heads.
  """

  kv_heads: Literal["field", "or_heads", "heads"] | Callable[[Fields, int], int] = "field"
  defaults: Mapping[str, Any] | None = None
  window: Callable[[Fields, int], list[str]] | None = None
  needs_head_dim: bool = False


def _everywhere(fields: Fields, layers: int) -> list[str]:
  return [FULL if fields.count_or_none("sliding_window") is None else SLIDING] * layers


def _last_of(pattern: int, field: str | None = None) -> Callable[[Fields, int], list[str]]:
  """Every n-th layer is a full one."""

  def kinds(fields: Fields, layers: int) -> list[str]:
    every = fields.count(field, default=pattern) if field else pattern
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]

  return kinds


def _above(fields: Fields, layers: int) -> list[str]:
  """Qwen's: the layers from `max_window_layers` on, if windows are switched on at all."""
  if not fields.flag("use_sliding_window") or fields.count_or_none("sliding_window") is None:
    return [FULL] * layers
  first = fields.count("max_window_layers", least=0)
  return [SLIDING if i >= first else FULL for i in range(layers)]


def _falcon_heads(fields: Fields, heads: int) -> int:
  if fields.flag("new_decoder_architecture"):
    return fields.count("num_kv_heads", default=heads)
  return 1 if fields.flag("multi_query", True) else heads


def _bigcode_heads(fields: Fields, heads: int) -> int:
  return 1 if fields.flag("multi_query", True) else heads


_LLAMA, _GQA, _MHA = Family("or_heads"), Family(), Family("heads")
_QWEN3 = Family(window=_above, defaults={"head_dim": 128})
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_GEMMA3 |= {"sliding_window": 4096, "hidden_size": 2304, "num_hidden_layers": 26}
_GEMMA3 |= {"max_position_embeddings": 131_072}
_GEMMA3N = {"head_dim": 256, "num_key_value_heads": 2, "sliding_window": 512}
FAMILIES: Mapping[str, Family] = MappingProxyType(
  {
    **dict.fromkeys(("llama", "phi", "olmo", "olmo2", "olmoe", "granite", "cohere"), _LLAMA),
    "granitemoe": _LLAMA,
    "stablelm": _GQA,
    **dict.fromkeys(("glm", "glm4", "seed_oss"), Family(defaults={"head_dim": 128})),
    "glm4_moe": Family(needs_head_dim=True),
    **dict.fromkeys(("qwen2", "qwen2_moe"), Family(window=_above)),
    "qwen3": _QWEN3,
    "qwen3_moe": Family(window=_above, needs_head_dim=True),
    "phi3": Family("or_heads", window=_everywhere),
    **dict.fromkeys(("starcoder2", "phimoe"), Family(window=_everywhere)),
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
    "gemma3n_text": Family(defaults={**_GEMMA3N, "num_kv_shared_layers": 15}, window=_last_of(5)),
    "cohere2": Family(
      "or_heads",
      defaults={"sliding_window": 4096},
      window=_last_of(4, "sliding_window_pattern"),
    ),
    "olmo3": Family("or_heads", defaults={"sliding_window": 4096}, window=_last_of(4)),
    "gpt_oss": Family(
      defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
      window=_last_of(2),
    ),
    "falcon": Family(_falcon_heads),
    "gpt_bigcode": Family(_bigcode_heads),
    **dict.fromkeys(("gpt2", "gptj", "gpt_neox", "opt", "bloom"), _MHA),
  }
)


def components(
  family: Family, fields: Fields, format: CacheFormat
) -> tuple[list[Component], list[Reads], int]:
  """Components, reads of each layer, and channels of keys and values if all heads had their own.

  Raises:
    ConfigError: a field that is missing or does not fit.
  """
  layers, heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
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
  if family.kv_heads == "heads":
    return heads
  if callable(family.kv_heads):
    return family.kv_heads(fields, heads)
  optional = family.kv_heads == "or_heads" or fields.says("num_key_value_heads")
  found = fields.count("num_key_value_heads", default=heads if optional else None)
  if heads % found:
    raise config_lib.ConfigError(
      f"{fields.name}: num_key_value_heads: is {found}; must divide num_attention_heads ({heads})"
    )
  return found


def _head_dim(family: Family, fields: Fields, heads: int) -> int:
  if fields.get("head_dim") is not None or family.needs_head_dim:
    return fields.count("head_dim")
  width = fields.count("hidden_size")
  if width % heads:
    raise config_lib.ConfigError(
      f"{fields.name}: hidden_size: is {width}, which num_attention_heads ({heads}) does not"
      " divide; head_dim is missing"
    )
  return width // heads


def _kinds(family: Family, fields: Fields, layers: int) -> list[str]:
  """Full or sliding, for each layer."""
  listed = fields.get("layer_types")
  if listed is None:
    listed = family.window(fields, layers) if family.window else [FULL] * layers
  if not isinstance(listed, list) or len(listed) != layers:
    raise config_lib.ConfigError(
      f"{fields.name}: layer_types: must list {layers} layers (num_hidden_layers)"
    )
  for i, kind in enumerate(listed):
    if kind not in (FULL, SLIDING):
      raise config_lib.ConfigError(
        f"{fields.name}: layer_types: layer {i} is {kind!r}; counted are {FULL} and {SLIDING}"
      )
  longest = fields.count_or_none("max_position_embeddings")
  if SLIDING in listed and longest is not None and fields.count("sliding_window") >= longest:
    return [FULL] * layers
  return listed
