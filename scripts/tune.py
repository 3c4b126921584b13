"""Measures the candidates of the tuning tables on the device at hand, at the released sizes.

    python scripts/tune.py --op=sparse_attention [--backend=triton] [--write]

For every row of a table that the released specs meet, the fastest candidate is printed; `--write`
puts it into `kernels/hysparse_kernels/<op>/tuning.json` for this kind of device.
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
  for op in [_OP.value] if _OP.value else sorted(OPERATIONS):
    try:
      backends = [_BACKEND.value] if _BACKEND.value else tuner.backends_here(op)
      for backend in backends:
        for winner in tuner.tune(op, backend, _ROUNDS.value):
          print(winner, flush=True)
          if _WRITE.value and winner.sizes:
            winner.write()
    except (BackendError, LookupError) as error:
      sys.exit(f"scripts/tune.py: {error}")


if __name__ == "__main__":
  app.run(main)
