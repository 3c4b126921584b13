"""What the command lines share: an error is one line and status 2, never a traceback."""

from __future__ import annotations

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


def fail(error: object) -> NoReturn:
  """Prints one line and exits with status 2."""
  print(f"error: {error}", file=sys.stderr)
  sys.exit(2)
