"""What a Triton kernel is launched with, as data, and the launch through jax-triton.

Backends describe a launch completely (kernel, arrays, results, grid, constants) and hand it to
`run`; tests take the same description to Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hysparse_kernels import compat, dispatch

_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("capability", default=None)


@dataclasses.dataclass(frozen=True)
class Launch:
  """One call of a kernel.

  Attributes:
    kernel: its parameters are the arrays, the results, then the constants by name.
    arrays: jax's, or NumPy's where nothing but the interpreter sees them.
    results: what it fills.
    grid: programs along up to three axes.
    constants: `tl.constexpr` parameters. All numbers are: jax-triton 0.3 makes float64 of floats.
    warps: of a program.
    stages: of a pipelined loop.
  """

  kernel: Any
  arrays: tuple[jax.Array, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]
  grid: tuple[int, ...]
  constants: Mapping[str, Any]
  warps: int
  stages: int


def lazy(op: str, name: str) -> dispatch.Lazy:
  """The entry of an operation's table for the function `name` of its Triton module."""
  return dispatch.Lazy(f"hysparse_kernels.{op}.triton", name, ("triton", "jax_triton"))


@contextlib.contextmanager
def compute_capability(version: int) -> Iterator[None]:
  """Lowers what is traced inside for a GPU that need not be here: 90 is Hopper."""
  token = _capability.set(version)
  try:
    yield
  finally:
    _capability.reset(token)


def run(launch: Launch) -> tuple[jax.Array, ...]:
  """The results of a launch.

  Raises:
    BackendError: jax-triton cannot be imported, which also needs a GPU in some versions.
  """
  try:
    return compat.triton_call(
      *launch.arrays,
      results=launch.results,
      kernel=launch.kernel,
      grid=launch.grid,
      num_warps=launch.warps,
      num_stages=launch.stages,
      compute_capability=_capability.get(),
      **launch.constants,
    )
  except ImportError as error:
    raise dispatch.BackendError(f"triton: jax-triton cannot be imported: {error}") from error
