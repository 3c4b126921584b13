"""How serving engines store what a layer keeps: named formats, each with its source.

Our own models have the precision dial (cache/layout.py); these are for models of other families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from hysparse import config as config_lib
from hysparse.cache.layout import Part


@dataclasses.dataclass(frozen=True)
class CacheFormat:
  """The arrays of an entry.

  Attributes:
    name: as `precision=` takes it.
    source: who stores entries this way.
    dtype: of plain formats, for any number of channels; None for a packing of fixed widths.
    latent: such a packing: the arrays of a latent entry, its RoPE channels included.
    index_key: and those of an indexer key.
    widths: channels that the packing is for: latent without RoPE, RoPE, indexer key.
  """

  name: str
  source: str
  dtype: str | None = None
  latent: tuple[Part, ...] = ()
  index_key: tuple[Part, ...] = ()
  widths: tuple[int, int, int] | None = None

  def check(self, model: str, latent: int, rope: int, index: int) -> None:
    """
    Raises:
      ConfigError: a model that the packing is not made for.
    """
    if self.widths is not None and (latent, rope, index) != self.widths:
      raise config_lib.ConfigError(
        f"precision: {self.name} packs {self.widths} channels (latent, RoPE, indexer key); {model}"
        f" has {(latent, rope, index)}; plain formats are {', '.join(PLAIN)}"
      )

  def latent_row(self, latent: int, rope: int) -> tuple[Part, ...]:
    if self.dtype is None:
      return self.latent
    return (Part("values", (latent + rope,), self.dtype),)

  def index_row(self, index: int) -> tuple[Part, ...]:
    return self.index_key if self.dtype is None else (Part("values", (index,), self.dtype),)


_OWN = "the model's dtype, as transformers' caches keep it"

FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
  {
    format.name: format
    for format in (
      CacheFormat("bf16", _OWN, "bfloat16"),
      CacheFormat("f16", _OWN, "float16"),
      CacheFormat("f32", _OWN, "float32"),
      CacheFormat("fp8", "vLLM's kv_cache_dtype=fp8: E4M3, one scale a tensor", "uint8"),
      CacheFormat(
        "v32",
        "FlashMLA's and vLLM's fp8_ds_mla: 512 E4M3, 4 float32 scales, 64 BF16 RoPE channels;"
        " indexer key: 128 E4M3, 1 float32 scale",
        latent=(
          Part("codes", (512,), "uint8"),
          Part("scales", (4,), "float32"),
          Part("rope", (64,), "bfloat16"),
        ),
        index_key=(Part("codes", (128,), "uint8"), Part("scales", (1,), "float32")),
        widths=(512, 64, 128),
      ),
      CacheFormat(
        "v4",
        "DeepSeek-V4's FlashMLA rows: 448 E4M3, 64 BF16 RoPE channels, 7 E8M0 scales padded to 8;"
        " indexer key: 128 E2M1 (MXFP4), 4 E8M0 scales",
        latent=(
          Part("codes", (448,), "uint8"),
          Part("rope", (64,), "bfloat16"),
          Part("scales", (8,), "uint8"),
        ),
        index_key=(Part("codes", (64,), "uint8"), Part("scales", (4,), "uint8")),
        widths=(448, 64, 128),
      ),
    )
  }
)
PLAIN = tuple(name for name, format in FORMATS.items() if format.dtype)
# What configs call their dtype.
OF_DTYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
