"""Chooses the backend of an operation: by platform, or by name.

A backend asked for by name that cannot run raises with the reason. "auto" takes the fastest one for
the default platform and says once, in the log, when that is not a kernel made for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

import jax

_log = logging.getLogger("hysparse_kernels")

# Best first; "xla" runs everywhere.
_PREFERENCE = {
  "cpu": ("xla",),
  "gpu": ("pallas_gpu", "triton", "xla"),
  "tpu": ("pallas_tpu", "xla"),
}
_RUNS_ON = {"pallas_gpu": "gpu", "triton": "gpu", "pallas_tpu": "tpu"}


class BackendError(ValueError):
  """A backend that does not exist for an operation or cannot run here; says why."""


def select(op: str, backend: str, table: Mapping[str, Callable]) -> Callable:
  """The implementation of `op` to run.

  Args:
    op: its name, for messages.
    backend: "auto" or a key of `table`.
    table: backend name -> implementation.

  Raises:
    BackendError: an unknown backend, or one made for another platform.
  """
  platform = jax.default_backend()
  platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
  if backend == "auto":
    wanted = _PREFERENCE.get(platform, ("xla",))
    chosen = next(name for name in wanted if name in table)
    if chosen == "xla" and platform != "cpu":
      _say_once(op, platform)
    return table[chosen]
  if backend not in table:
    raise BackendError(f"{op}: no backend '{backend}'; it has auto, {', '.join(table)}")
  if _RUNS_ON.get(backend, platform) != platform:
    raise BackendError(
      f"{op}: backend '{backend}' runs on {_RUNS_ON[backend]}, the default platform is {platform}"
    )
  return table[backend]


@functools.cache
def _say_once(op: str, platform: str) -> None:
  _log.warning("%s: no kernel for %s yet, using the portable xla backend", op, platform)
