"""What callers pass is looked at before anything is computed: sizes, integers, numbers.

Arrays are named with their axes, as everywhere here: `x_NxD` is [N, D], `scale_3` has three
elements.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def whole(
  name: str,
  value: object,
  low: int = 1,
  high: int | None = None,
  error: type[Exception] = ValueError,
) -> int:
  """The value, if it is a whole number from `low` to `high` (None: without end).

  Raises:
    error: it is not; true, false and traced values are none.
  """
  is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_whole or value < low or (high is not None and value > high):
    legal = f"from {low} up" if high is None else f"in {low}..{high}"
    raise error(f"{name}: is {value!r}; must be a whole number {legal}")
  return int(value)


def real(name: str, value: object, low: float = -math.inf) -> float:
  """The value, if it is a finite number that is not smaller than `low`.

  Raises:
    ValueError: it is not; traced values are compiled for, so they cannot be one.
  """
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_real or not math.isfinite(value) or value < low:
    legal = "" if low == -math.inf else f" from {low:g} up"
    raise ValueError(f"{name}: is {value!r}; must be a finite number{legal}, known when compiling")
  return float(value)


def sizes(**arrays: Any) -> dict[str, int]:
  """Sizes of the axes that the names of arrays tell; the same letter is the same size everywhere.

  Raises:
    TypeError: something without a shape.
    ValueError: an array of other axes than its name says, or with an empty one.
  """
  found: dict[str, int] = {}
  for name, array in arrays.items():
    shape = getattr(array, "shape", None)
    if shape is None:
      raise TypeError(f"{name}: is a {type(array).__name__}; must be an array")
    axes = name.rsplit("_", 1)[-1].split("x")
    known = {axis: int(axis) for axis in axes if axis.isdigit()} | found
    fits = len(shape) == len(axes)
    for axis, size in zip(axes, shape, strict=False):
      fits &= known.setdefault(axis, size) == size
    if not fits:
      legal = ", ".join(str(found.get(axis, axis)) for axis in axes)
      raise ValueError(f"{name}: has shape {list(shape)}; must be [{legal}]")
    if 0 in shape:
      raise ValueError(f"{name}: has shape {list(shape)}; no axis may be empty")
    found = known
  return found


def integers(**arrays: Any) -> None:
  """
  Raises:
    ValueError: an array that does not hold signed integers.
  """
  for name, array in arrays.items():
    if np.dtype(array.dtype).kind != "i":
      raise ValueError(f"{name}: is {array.dtype}; must be signed integers")


def floats(**arrays: Any) -> None:
  """
  Raises:
    ValueError: an array that does not hold floating-point numbers.
  """
  for name, array in arrays.items():
    if np.dtype(array.dtype).kind not in "fV":  # V: bfloat16 and narrower ones
      raise ValueError(f"{name}: is {array.dtype}; must be floating-point numbers")
