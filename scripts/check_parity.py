"""Compares a checkpoint's outputs with those that the published code gave for it.

python scripts/check_parity.py --case=tests/golden/tiny-text [--mode=exact|kvquant|official|all]

Prints for each array the error, the limit and pass or FAIL (--json: as JSON). Status 0 if all pass,
1 if any fails or was not compared although it could be, 2 for a folder that cannot be read. All
modes of one case take two minutes on 2 cores, nearly all of it to compile.
"""

import json
import os
from collections.abc import Sequence

# Most of the time goes into compiling programs that run a few times: half of it is LLVM.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from absl import app, flags, logging

import hysparse
from hysparse import command_line
from hysparse.conversion import parity, parity_case

_CASE = flags.DEFINE_string("case", None, "Folder of a case.", required=True)
_MODE = flags.DEFINE_enum("mode", "all", [*parity_case.MODES, "all"], "Numeric mode to compare.")
_JSON = flags.DEFINE_bool("json", False, "Print JSON.")


def main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    command_line.fail(f"{argv[1]}: not understood")
  logging.set_verbosity(logging.WARNING)  # JAX tells of every backend that is not there
  try:
    case = parity_case.read(_CASE.value)
    loaded = hysparse.load(_CASE.value)
    modes = case.modes if _MODE.value == "all" else (_MODE.value,)
    report = parity.check(loaded.config, loaded.state, case, modes)
  except parity.USER_ERRORS as error:
    command_line.fail(error)
  if _JSON.value:
    print(json.dumps({"case": _CASE.value, "modes": modes} | report.to_dict(), indent=1))
  else:
    print("\n".join(report.lines()))
  return 0 if report.ok else 1


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse)
