"""Chooses the backend of an operation: by platform, or by name.

A backend asked for by name that cannot run raises with the reason. "auto" takes the fastest one for
the default platform and says once, in the log, when that is not a kernel made for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any

from hysparse_kernels import compat

_log = logging.getLogger("hysparse_kernels")

# Best first; "xla" runs everywhere.
_PREFERENCE = {
  "cpu": ("xla",),
  "gpu": ("pallas_gpu", "triton", "ragged_dot", "xla"),
  "tpu": ("pallas_tpu", "ragged_dot", "xla"),
}
RUNS_ON = {"pallas_gpu": "gpu", "triton": "gpu", "pallas_tpu": "tpu"}


class BackendError(ValueError):
  """A backend that does not exist for an operation or cannot run here; says why."""


@dataclasses.dataclass(frozen=True)
class Lazy:
  """A backend that needs packages of its own: its module is imported when it runs.

  Attributes:
    module: where it is.
    name: of its function.
    packages: what has to be installed.
  """

  module: str
  name: str
  packages: tuple[str, ...]

  def __call__(self, *arguments: Any) -> Any:
    try:
      module = importlib.import_module(self.module)
    except ImportError as error:
      raise BackendError(f"{self.module} cannot be imported: {error}") from error
    return getattr(module, self.name)(*arguments)

  def missing(self) -> list[str]:
    """Packages that are not installed."""
    return [name for name in self.packages if importlib.util.find_spec(name) is None]


def select(op: str, backend: str, table: Mapping[str, Callable]) -> Callable:
  """The implementation of `op` to run.

  Args:
    op: its name, for messages.
    backend: "auto" or a key of `table`.
    table: backend name -> implementation.

  Raises:
    BackendError: an unknown backend, or one made for another platform.
  """
  platform = compat.platform()
  if backend == "auto":
    preferred = _PREFERENCE.get(platform, ("xla",))
    missing = {n: table[n].missing() for n in preferred if isinstance(table.get(n), Lazy)}
    chosen = next(name for name in preferred if name in table and not missing.get(name))
    if chosen == "xla" and platform != "cpu":
      needs = [f"; '{name}' needs {', '.join(packages)}" for name, packages in missing.items()]
      _say_once(op, platform, "".join(needs))
    return table[chosen]
  if not isinstance(backend, str) or backend not in table:
    raise BackendError(f"{op}: no backend {backend!r}; it has auto, {', '.join(table)}")
  if RUNS_ON.get(backend, platform) != platform:
    raise BackendError(
      f"{op}: backend '{backend}' runs on {RUNS_ON[backend]}, the platform is {platform}; here run"
      f" auto, {', '.join(['reference', *here(table)])}"
    )
  return table[backend]


def here(table: Mapping[str, Callable]) -> list[str]:
  """Backends that run on this platform and whose packages are installed; the reference is none."""
  platform = compat.platform()
  return [
    name
    for name, backend in table.items()
    if name != "reference"
    and RUNS_ON.get(name, platform) == platform
    and not (isinstance(backend, Lazy) and backend.missing())
  ]


@functools.cache
def _say_once(op: str, platform: str, needs: str) -> None:
  _log.warning("%s: no kernel for %s, using the portable xla backend%s", op, platform, needs)
