"""What the command lines share: an error is one line and status 2, never a traceback."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import flags


def parse(argv: Sequence[str]) -> list[str]:
  """`flags_parser` of absl's `app.run`: what is left of the command line besides flags."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    missing = re.findall(r"--(\w+)=None", str(error))
    fail(", ".join(f"--{name}" for name in missing) + ": missing" if missing else error)


def check_output(flag: str, file: str | None) -> None:
  """Fails if a file cannot be written, before the work whose result it shall hold."""
  if file is None:
    return
  path = pathlib.Path(file)
  if not path.parent.is_dir():
    fail(f"--{flag}={path}: there is no folder {path.parent}")
  if path.is_dir() or not os.access(path.parent, os.W_OK):
    fail(f"--{flag}={path}: cannot be written")


def fail(error: object) -> NoReturn:
  """Prints one line and exits with status 2."""
  print(f"error: {error}", file=sys.stderr)
  sys.exit(2)
