"""The only codecs: E2M1, E4M3 and E8M0, block quantisers, packing, fake quantisation, weights.

Codes and scales are uint8 arrays everywhere; a float8 or float4 dtype is never stored.
"""

from hysparse_kernels.formats import e8m0
from hysparse_kernels.formats.minifloat import Minifloat, e2m1, e4m3
from hysparse_kernels.formats.packing import EvenColumnLow, SplitHalf
from hysparse_kernels.formats.quantised import Quantised, WeightFormat, quantise
from hysparse_kernels.formats.quantisers import (
  QUANTISERS,
  Blocks,
  Format,
  dequantise_blocks,
  fake_quant,
  quantise_blocks,
  round_to,
)
from hysparse_kernels.formats.stored import Stored

__all__ = [
  "QUANTISERS",
  "Blocks",
  "EvenColumnLow",
  "Format",
  "Minifloat",
  "Quantised",
  "SplitHalf",
  "Stored",
  "WeightFormat",
  "dequantise_blocks",
  "e2m1",
  "e4m3",
  "e8m0",
  "fake_quant",
  "quantise",
  "quantise_blocks",
  "round_to",
]
