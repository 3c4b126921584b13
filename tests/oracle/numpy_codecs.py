"""Rounding of cached values in NumPy, value by value, as the published rules say it.

Each returns what a reader of the cache would see: the nearest representable values, in float64.
"""

import numpy as np


def _round(x: np.ndarray, smallest: int, bits: int, largest: float) -> np.ndarray:
  """Nearest value of a small float, ties to even, clamped.

  Args:
    x: any values.
    smallest: exponent below which the spacing no longer shrinks.
    bits: of the mantissa.
    largest: magnitude.
  """
  x = np.clip(x.astype(np.float64), -largest, largest)
  _, exponent = np.frexp(x)  # |x| = m * 2^exponent with m in [0.5, 1)
  spacing = np.exp2(np.maximum(exponent - 1, smallest) - bits)
  return np.rint(x / spacing) * spacing


def e2m1(x: np.ndarray) -> np.ndarray:
  return _round(x, 0, 1, 6.0)


def e4m3(x: np.ndarray) -> np.ndarray:
  return _round(x, -6, 3, 448.0)


def _power_of_two(amax: np.ndarray, largest: float) -> np.ndarray:
  """2^ceil(log2(amax / largest)) in float32, by the exponent."""
  mantissa, exponent = np.frexp(amax * np.float32(1 / largest))
  return np.exp2(exponent - (mantissa == 0.5)).astype(np.float32)


def _blocks(x: np.ndarray, size: int, floor: float) -> tuple[np.ndarray, np.ndarray]:
  """float32 blocks of the last axis and the largest magnitude of each."""
  blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, size)
  amax = np.abs(blocks).max(-1, keepdims=True, initial=0)
  return blocks, np.maximum(amax, np.float32(floor))


def fp4(x: np.ndarray) -> np.ndarray:
  """Entries: E2M1, an E4M3 scale for each 16 channels."""
  blocks, amax = _blocks(x, 16, 6 * 2.0**-9)
  scale = e4m3(amax / np.float32(6)).astype(np.float32)
  return (e2m1(blocks / scale) * scale).reshape(x.shape)


def mxfp4(x: np.ndarray) -> np.ndarray:
  """Index keys and queries: E2M1, a power of two for each 32 channels."""
  blocks, amax = _blocks(x, 32, 6 * 2.0**-126)
  scale = _power_of_two(amax, 6)
  return (e2m1(blocks / scale) * scale).reshape(x.shape)


def fp8(x: np.ndarray) -> np.ndarray:
  """Window keys: E4M3, a power of two for each 32 channels."""
  blocks, amax = _blocks(x, 32, 1e-4)
  scale = _power_of_two(amax, 448)
  return (e4m3(blocks / scale) * scale).reshape(x.shape)
