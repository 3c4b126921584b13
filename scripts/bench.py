"""Runs one benchmark: `python scripts/bench.py train_step [--rounds=7] [--json=FILE]`.

Each is measured beside its yardstick in the same run and reported as a ratio; docs/ keeps results.
"""

import importlib
import json
import pathlib
import pkgutil
import sys
from collections.abc import Sequence

from absl import app, flags

from hysparse import benchmarks, command_line

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved measurements.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def main(argv: Sequence[str]) -> None:
  modules = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
  names = [name for name in modules if name not in benchmarks.TOOLS]
  if len(argv) > 2:
    sys.exit(f"scripts/bench.py: unexpected argument '{argv[2]}'")
  if len(argv) != 2 or argv[1] not in names:
    sys.exit(f"usage: scripts/bench.py NAME, one of: {', '.join(names)}")
  command_line.check_output("json", _JSON.value)
  result = importlib.import_module(f"hysparse.benchmarks.{argv[1]}").run(_ROUNDS.value)
  print(result)
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(result.to_dict(), indent=1), encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
