"""How many programs XLA really compiles, by what it reports itself."""

import collections
import contextlib
from collections.abc import Iterator

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[collections.Counter]:
  """Programs that XLA compiles inside the block, by the name of the function."""
  names = collections.Counter()

  def heard(event: str, seconds: float, **about: str) -> None:
    del seconds
    if event == COMPILED:
      names[about["fun_name"]] += 1

  jax.monitoring.register_event_duration_secs_listener(heard)
  try:
    yield names
  finally:
    jax.monitoring.unregister_event_duration_listener(heard)
