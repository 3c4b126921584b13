"""Measures the candidates of the tuning tables on the device at hand, at the released sizes.

    python scripts/tune.py --op=sparse_attention [--backend=triton] [--write]

For every row of a table that the released specs meet, the fastest candidate is printed; `--write`
puts it into `kernels/hysparse_kernels/<op>/tuning.json` for this kind of device. The released sizes
are made for accelerators: on a CPU a table takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags
from hysparse_kernels import tuner
from hysparse_kernels.catalogue import OPERATIONS
from hysparse_kernels.dispatch import BackendError

_OP = flags.DEFINE_enum("op", None, sorted(OPERATIONS), "One operation; all if not given.")
_BACKEND = flags.DEFINE_string("backend", None, "One backend; all that run here if not given.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved measurements.", lower_bound=1)
_WRITE = flags.DEFINE_boolean("write", False, "Write the winners into the tables.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"scripts/tune.py: unexpected argument '{argv[1]}'")
  jobs = [
    (op, backend)
    for op in ([_OP.value] if _OP.value else sorted(OPERATIONS))
    for backend in tuner.backends_here(op)
    if _BACKEND.value in (None, backend)
  ]
  if _OP.value and _BACKEND.value:
    jobs = [(_OP.value, _BACKEND.value)]  # if it cannot be, `tune` says why
  if not jobs:
    sys.exit("scripts/tune.py: nothing to tune: no such backend has a tuning table and runs here")
  for op, backend in jobs:
    try:
      print(f"{op} {backend}: measuring", file=sys.stderr, flush=True)
      for winner in tuner.tune(op, backend, _ROUNDS.value):
        print(winner, flush=True)
        if _WRITE.value and winner.sizes:
          winner.write()
    except (BackendError, LookupError, ValueError) as error:
      sys.exit(f"scripts/tune.py: {error}")


if __name__ == "__main__":
  app.run(main)
