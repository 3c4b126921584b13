"""Compiles the kernels for TPUs and an NVIDIA GPU that need not be here, and says what they take.

    bash scripts/aot/setup.sh
    .venv-aot/bin/python scripts/aot_check.py [--target=v5e] [--op=indexer] [--backend=pallas_tpu]

Every backend with each operation's specs of the released sizes, the gradients that training needs
and a few small specs; xla on TPUs only with the small ones unless --all, for it takes minutes. A
compiler that fails or ends, a kernel that asks for more memory than the chip has, one that is
missing in the compiled program and one that does nothing are named, and the exit status is 1.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags
from hysparse_kernels.aot import runner
from hysparse_kernels.aot.canaries import CANARIES, EXPECTED
from hysparse_kernels.aot.targets import TARGETS
from hysparse_kernels.aot.worker import GRADIENT
from hysparse_kernels.catalogue import OPERATIONS

from hysparse import command_line

_BACKENDS = sorted({name for op in OPERATIONS.values() for name in op.backends} - {"reference"})
_TARGET = flags.DEFINE_multi_enum("target", list(TARGETS), list(TARGETS), "Chips.")
_OP = flags.DEFINE_multi_enum("op", list(OPERATIONS), list(OPERATIONS), "Operations.")
_BACKEND = flags.DEFINE_multi_enum("backend", _BACKENDS, _BACKENDS, "Backends.")
_SPEC = flags.DEFINE_multi_string("spec", [], "Specs by name, instead of each operation's choice.")
_ALL = flags.DEFINE_bool("all", False, "All specs of each operation.")
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes at a time.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 300, "Limit for one spec.", lower_bound=1)


def _specs(op, backend, platform):
  small = [spec.name for spec in op.specs]
  large = [spec.name for spec in op.released] + [name + GRADIENT for name in op.trained]
  if _SPEC.value:
    return [name for name in small + large if name in _SPEC.value]
  if _ALL.value:
    return small + large
  small = [name for name in small if name in op.compiled]
  return small if (backend, platform) == ("xla", "tpu") else small + large


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"aot_check: unexpected argument '{argv[1]}'")
  command_line.check_output("json", _JSON.value)
  platforms = {name: TARGETS[name].platform for name in _TARGET.value}
  operations = {name: OPERATIONS[name] for name in _OP.value}
  names = {
    name
    for op in operations.values()
    for name in (*(s.name for s in (*op.specs, *op.released)), *(n + GRADIENT for n in op.trained))
  }
  if unknown := set(_SPEC.value) - names:
    sys.exit(f"aot_check: --spec={min(unknown)}: is none of {', '.join(sorted(names))}")
  jobs = [*runner.jobs(operations, platforms, _BACKEND.value, _specs)]
  if not jobs:
    sys.exit("aot_check: nothing to compile; see --help")
  jobs += runner.jobs(CANARIES, platforms, _BACKEND.value, lambda op, *_: op.compiled)
  outcomes = []
  for outcome in runner.judge(runner.run(jobs, _SECONDS.value, _WORKERS.value), EXPECTED):
    print(runner.line(outcome), flush=True)
    outcomes.append(outcome)
  failed = [outcome for outcome in outcomes if outcome.failure]
  if _JSON.value:
    found = [dataclasses.asdict(outcome) for outcome in outcomes]
    pathlib.Path(_JSON.value).write_text(json.dumps(found, indent=1), encoding="utf-8")
  print(f"{len(outcomes) - len(failed)} compiled, {len(failed)} failed")
  for outcome in failed:
    print(runner.line(outcome))
  sys.exit(1 if failed else 0)


if __name__ == "__main__":
  app.run(main)
