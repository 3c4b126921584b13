"""The quantisers once more, in NumPy: tables of values, nearest by search, float64 throughout."""

from __future__ import annotations

import numpy as np


def _e4m3_value(code: int) -> float:
  sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
  if exponent == 15 and mantissa == 7:
    return np.nan
  if exponent == 0:
    return sign * mantissa / 8 * 2.0**-6
  return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# The value of every code.
VALUES = {
  "e2m1": np.array(_POSITIVE + [-v for v in _POSITIVE]),
  "e4m3": np.array([_e4m3_value(code) for code in range(256)]),
}

BLOCK = {"fp4": 16, "mxfp4": 32, "fp8": 32}
ELEMENT = {"fp4": "e2m1", "mxfp4": "e2m1", "fp8": "e4m3"}
# Largest value of the codes, smallest amax.
ELEMENT_SCALE = {
  "fp4": (6.0, 6 * 2.0**-9),
  "mxfp4": (6.0, 6 * 2.0**-126),
  "fp8": (448.0, 1e-4),
}


def nearest_code(name: str, x: np.ndarray) -> np.ndarray:
  """Code of the nearest value of a format: of two equally near the even one. x holds no NaN."""
  positive = VALUES[name][: len(VALUES[name]) // 2]
  positive = positive[np.isfinite(positive)]
  magnitude = np.minimum(np.abs(np.float64(x)), positive[-1])
  above = np.clip(np.searchsorted(positive, magnitude), 1, len(positive) - 1)
  below = above - 1
  to_above, to_below = positive[above] - magnitude, magnitude - positive[below]
  even = np.where(above % 2 == 0, above, below)
  code = np.where(to_above == to_below, even, np.where(to_above < to_below, above, below))
  return (code + np.signbit(x) * len(VALUES[name]) // 2).astype(np.uint8)


def scale_code(amax: np.ndarray, format: str) -> np.ndarray:
  """Scale byte of blocks with these largest magnitudes, float32 and not yet floored."""
  largest, floor = ELEMENT_SCALE[format]
  amax = np.maximum(amax, np.float32(floor))
  if format == "fp4":
    return nearest_code("e4m3", amax / np.float32(largest))
  fraction, exponent = np.frexp(amax * np.float32(1 / largest))
  return (exponent - (fraction == 0.5) + 127).astype(np.uint8)


def scale_value(code: np.ndarray, format: str) -> np.ndarray:
  """Scales of bytes, float64."""
  return VALUES["e4m3"][code] if format == "fp4" else np.ldexp(1.0, np.int64(code) - 127)


def oracle_quantise(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
  """Codes and scales of finite float32 x along its last axis."""
  codes, scales = np.empty(x.shape, np.uint8), []
  for first in range(0, x.shape[-1], BLOCK[format]):
    block = x[..., first : first + BLOCK[format]]
    scales.append(scale_code(np.abs(block).max(-1), format))
    ratio = block / np.float32(scale_value(scales[-1], format))[..., None]
    codes[..., first : first + BLOCK[format]] = nearest_code(ELEMENT[format], ratio)
  return codes, np.stack(scales, axis=-1)


def oracle_dequantise(codes: np.ndarray, scales: np.ndarray, format: str) -> np.ndarray:
  """float32 values of codes and scales."""
  each = np.repeat(scale_value(scales, format), BLOCK[format], axis=-1)[..., : codes.shape[-1]]
  with np.errstate(over="ignore"):
    return (VALUES[ELEMENT[format]][codes] * each).astype(np.float32)
