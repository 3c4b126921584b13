"""DeepSeek's families: latent attention (V2, V3), with an indexer (V3.2), compressed (V4).

Source: transformers, `configuration_deepseek_*.py`; the released config.json of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from hysparse import config as config_lib
from hysparse.cache.layout import Component
from hysparse.footprint.entry_formats import CacheFormat
from hysparse.footprint.fields import Fields
from hysparse.footprint.kept import Reads

# V4's compressed layers: entries of 4 tokens are chosen by an indexer, those of 128 all read.
_INDEXED, _HEAVY = 4, 128

Found = tuple[list[Component], list[Reads], int]


def mla(fields: Fields, format: CacheFormat) -> Found:
  """One latent and one RoPE key a token and layer, shared by all heads."""
  return _latent(fields, format, index=0)


def indexed_mla(fields: Fields, format: CacheFormat) -> Found:
  """The same with an indexer key."""
  return _latent(fields, format, index=fields.count("index_head_dim"))


def _latent(fields: Fields, format: CacheFormat, index: int) -> Found:
  layers = fields.count("num_hidden_layers")
  latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
  format.check(fields.name, latent, rope, index)
  every = tuple(range(layers))
  found = [_grown("main_kv", every, format, format.latent_row(latent, rope), 1)]
  if index:
    found.append(_grown("index_keys", every, format, format.index_row(index), 1))
  head = fields.count("qk_nope_head_dim") + rope + fields.count("v_head_dim")
  reads = [Reads(latent + rope + index, Fraction(1), owns=True)] * layers
  return found, reads, fields.count("num_attention_heads") * head


def compressed(fields: Fields, format: CacheFormat) -> Found:
  """V4: every layer has a window and, by its compression ratio, entries of 4 or of 128 tokens."""
  layers, dim = fields.count("num_hidden_layers"), fields.count("head_dim")
  rope, index = fields.count("qk_rope_head_dim"), fields.count("index_head_dim")
  format.check(fields.name, dim - rope, rope, index)
  ratios = fields.get("compress_ratios")
  if not isinstance(ratios, list) or len(ratios) < layers:
    raise config_lib.ConfigError(
      f"{fields.name}: compress_ratios: must list a ratio for each of {layers} layers"
    )
  ratios = ratios[:layers]  # what follows are prediction layers
  for i, ratio in enumerate(ratios):
    if ratio not in (0, _INDEXED, _HEAVY):
      raise config_lib.ConfigError(
        f"{fields.name}: compress_ratios: layer {i} has {ratio!r}; counted are 0, {_INDEXED} (with"
        f" an indexer) and {_HEAVY}"
      )
  row, found = format.latent_row(dim - rope, rope), []
  of = {ratio: tuple(i for i in range(layers) if ratios[i] == ratio) for ratio in (4, 128)}
  for ratio, owners in of.items():
    if owners:
      found.append(_grown("main_kv", owners, format, row, ratio))
  if of[_INDEXED]:
    found.append(_grown("index_keys", of[_INDEXED], format, format.index_row(index), _INDEXED))
  window = fields.count("sliding_window")
  found.append(Component("window", tuple(range(layers)), format.name, row, "bounded", rows=window))
  reads = [
    Reads(dim + (index if r == _INDEXED else 0), Fraction(1, r) if r else Fraction(0), owns=True)
    for r in ratios
  ]
  return found, reads, 2 * fields.count("num_attention_heads") * dim


def _grown(name, layers, format: CacheFormat, row, ratio: int) -> Component:
  return Component(name, layers, format.name, row, "global", Fraction(1, ratio))


# How each family is counted, and the format that its engine stores it in; None: the model's dtype.
FAMILIES: Mapping[str, tuple[Callable[[Fields, CacheFormat], Found], str | None]] = (
  MappingProxyType(
    {
      "deepseek_v2": (mla, None),
      "deepseek_v3": (mla, None),
      "kimi_k2": (mla, None),
      "deepseek_v32": (indexed_mla, "v32"),
      "deepseek_v4": (compressed, "v4"),
    }
  )
)
