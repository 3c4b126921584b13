"""Trains a config in a workdir, or goes on from where that workdir stands.

python scripts/train.py --config=configs/tiny.py --workdir=runs/tiny --config.optim.lr=1e-3

SIGTERM and Ctrl-C write a checkpoint and stop; the same command then goes on, to the same numbers.
A second Ctrl-C stops at once. Exit status: 0 done or stopped by a signal, 2 an error of input, data
or disk or a loss that is not finite (one line), 130 interrupted.

The step is compiled at each start. JAX_COMPILATION_CACHE_DIR=FOLDER keeps compiled programs; that
is not the default: programs for CPUs hold instructions of the machine that compiled them, and a
workdir may move.
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from hysparse import command_line, config_file, experiment

_CONFIG = flags.DEFINE_string(
  "config", None, "A file of configs/; --config.group.field=value overrides a field."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the experiment, made if missing.")
flags.mark_flags_as_required(["config", "workdir"])


def run(argv: Sequence[str]) -> None:
  """Runs a command line; exits with its status."""
  arguments, overrides = config_file.split_overrides(argv)
  app.run(lambda rest: _main(rest, overrides), argv=arguments, flags_parser=command_line.parse)


def _main(argv: Sequence[str], overrides: Sequence[str]) -> None:
  if argv[1:]:
    command_line.fail(f"{argv[1]}: not understood; everything is given as --flag=value")
  if not flags.FLAGS["verbosity"].present:
    # Orbax logs a page about each checkpoint; what fails there reaches us as an exception.
    logging.set_verbosity(logging.FATAL)
  try:
    config = config_file.load(_CONFIG.value, overrides)
    experiment.run(config, pathlib.Path(_WORKDIR.value))
  except experiment.USER_ERRORS as error:
    command_line.fail(error)
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: an ordinary exit waits for, and may crash over, what the device is still computing.
    os._exit(130)


if __name__ == "__main__":
  run(sys.argv)
