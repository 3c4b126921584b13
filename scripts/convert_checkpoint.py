"""Converts a released folder to a workdir, or a workdir to a released folder.

python scripts/convert_checkpoint.py --source=DeepSeek-V4.1-Flash --target=runs/flash
python scripts/convert_checkpoint.py --source=runs/flash --target=flash-again

The first keeps weights quantised; --dequantise=bf16 or f32 makes plain arrays of them. The second
quantises plain arrays; with --base=FOLDER a tensor that equals what is stored there gets the bytes
from there. Exit status: 0 done, 2 an error of input or disk, 130 interrupted. Nothing is left at
the target unless all of it was written.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from hysparse import command_line
from hysparse.conversion import convert

_SOURCE = flags.DEFINE_string("source", None, "A released folder, or a workdir.")
_TARGET = flags.DEFINE_string("target", None, "The folder to make of it; missing or empty.")
_BASE = flags.DEFINE_string("base", None, "A released folder to take bytes of equal tensors from.")
_DEQUANTISE = flags.DEFINE_enum("dequantise", None, ["bf16", "f32"], "Make plain arrays.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint of a workdir; the newest by default.")
flags.mark_flags_as_required(["source", "target"])


def main(argv: Sequence[str]) -> None:
  if argv[1:]:
    command_line.fail(f"{argv[1]}: not understood; everything is given as --flag=value")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.FATAL)  # Orbax logs a page about each checkpoint
  try:
    convert.convert(
      pathlib.Path(_SOURCE.value),
      pathlib.Path(_TARGET.value),
      base=None if _BASE.value is None else pathlib.Path(_BASE.value),
      dequantise=_DEQUANTISE.value,
      step=_STEP.value,
    )
  except convert.USER_ERRORS as error:
    command_line.fail(error)
  except KeyboardInterrupt:
    print("interrupted; nothing was written", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse)
