"""The command line of the footprint.

python -m hysparse.footprint config.json [--json]
python -m hysparse.footprint --config=configs/tiny.py [--config.model.main_kv=bf16] [--json]
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

from absl import app, flags

from hysparse import command_line, config_file, footprint
from hysparse import config as config_lib

_CONFIG = flags.DEFINE_string(
  "config", None, "A file of configs/ (its fields can be overridden) or a released config.json."
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")


def run() -> None:
  """Reads sys.argv, prints the footprint; errors of the user's are one line and exit status 2."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
  argv, overrides = config_file.split_overrides(sys.argv)
  app.run(lambda rest: _main(rest, overrides), argv=argv, flags_parser=command_line.parse)


def _main(argv: Sequence[str], overrides: Sequence[str]) -> None:
  given = [*argv[1:], *([_CONFIG.value] if _CONFIG.value else [])]
  try:
    if len(given) != 1:
      raise config_lib.ConfigError(
        f"config: {len(given)} files given, one is needed: config.json or --config=configs/NAME.py"
      )
    counted = footprint.footprint(footprint.read(given[0], overrides=overrides))
  except config_lib.ConfigError as error:
    command_line.fail(error)
  print(json.dumps(counted.to_dict(), indent=2) if _JSON.value else footprint.render(counted))


if __name__ == "__main__":
  run()
