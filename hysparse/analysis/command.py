"""The command line of scripts/footprint.py."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from hysparse import command_line, config_file
from hysparse import config as config_lib
from hysparse.analysis import page
from hysparse.analysis.comparison import Comparison, compare
from hysparse.analysis.flop_table import work
from hysparse.analysis.reduction import waterfall
from hysparse.analysis.sessions import Capacity, capacity
from hysparse.analysis.table import Table, footprint
from hysparse.footprint import count, read, render

_CONFIG = flags.DEFINE_string("config", None, "A model, beside those given without a flag.")
_COMPARE = flags.DEFINE_list("compare", [], "Models to put beside the first one.")
_CONTEXT = flags.DEFINE_integer("context", None, "Tokens of each sequence.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
_PRECISION = flags.DEFINE_string(
  "precision", None, "A format (bf16, fp8, ...), or those of components: main_kv=fp8,index_k=fp8."
)
_PAGE = flags.DEFINE_integer("page", None, "Tokens in a page of the cache.")
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices that hold the same sequences.")
_DEVICES = flags.DEFINE_integer("devices", None, "Count sessions on so many devices.")
_HBM = flags.DEFINE_float("hbm", 80e9, "Bytes of memory of each device.")
_WEIGHTS = flags.DEFINE_float("weights", None, "Bytes of the weights, of another family's model.")
_VERIFY = flags.DEFINE_bool("verify", False, "Allocate the cache and measure its arrays.")
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")
_HTML = flags.DEFINE_string("html", None, "Write a page with tables and pictures to this file.")
_PLOT = flags.DEFINE_string("plot", None, "Write the picture to this .png, .svg or .pdf file.")


def run() -> None:
  """Reads sys.argv; errors of the user's are one line and exit status 2."""
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
  argv, overrides = config_file.split_overrides(sys.argv)
  app.run(lambda rest: _main(rest, overrides), argv=argv, flags_parser=command_line.parse)


def _main(argv: Sequence[str], overrides: Sequence[str]) -> None:
  try:
    _check_files()
    names = [*([_CONFIG.value] if _CONFIG.value else []), *argv[1:], *_COMPARE.value]
    if not names:
      raise config_lib.ConfigError(
        "config: no file given; a config of ours, a workdir, a released folder or a config.json"
      )
    if len(names) > 1 and (_VERIFY.value or _DEVICES.value is not None):
      raise config_lib.ConfigError("--verify and --devices are for one model; several were given")
    tables = [_table(name, () if i else overrides) for i, name in enumerate(names)]
    if len(tables) > 1:
      _show_comparison(compare(*tables))
    else:
      _show(tables[0])
  except (config_lib.ConfigError, OSError) as error:
    command_line.fail(error)


def _check_files() -> None:
  """Before anything is counted, that what will be written can be."""
  for flag, legal in ((_HTML, (".html", ".htm")), (_PLOT, (".png", ".svg", ".pdf"))):
    if flag.value is None:
      continue
    path = pathlib.Path(flag.value)
    if path.suffix not in legal:
      raise config_lib.ConfigError(f"{flag.name}: is {path}; must end in {', '.join(legal)}")
    command_line.check_output(flag.name, flag.value)


def _table(name: str, overrides: Sequence[str]) -> Table:
  model = read(name, precision=_precision(), page=_PAGE.value, overrides=overrides)
  return footprint(model, context=_CONTEXT.value, batch=_BATCH.value, replicas=_REPLICAS.value)


def _precision() -> str | Mapping[str, str] | None:
  text = _PRECISION.value
  if text is None or "=" not in text:
    return text
  pairs = [part.partition("=") for part in text.split(",")]
  for name, sign, _ in pairs:
    if not sign:
      raise config_lib.ConfigError(f"precision: {name!r} has no =format; {text!r} was given")
  return {name: format for name, _, format in pairs}


def _show(table: Table) -> None:
  machine = _capacity(table)
  if _JSON.value:
    print(table.to_json())
  else:
    print(render(count.footprint(table.model)), end="\n\n")
    print(*[table, *filter(None, [machine])], sep="\n\n")
  if _VERIFY.value:
    verified = table.verify()
    print(verified, file=sys.stderr if _JSON.value else sys.stdout)
    if not verified.equal:
      sys.exit(1)
  _write(f"The cache of {table.model.name}", table, _parts(table, machine))


def _show_comparison(comparison: Comparison) -> None:
  print(comparison.to_json() if _JSON.value else comparison)
  # The picture is made only if there is a page.
  parts = (part() for part in (lambda: comparison, comparison.plot))
  _write("Caches beside each other", comparison, parts)


def _write(title: str, shown: Table | Comparison, parts) -> None:
  if _PLOT.value:
    shown.plot().save(_PLOT.value)
  if _HTML.value:
    page.write(_HTML.value, title, parts)


def _parts(table: Table, machine: Capacity | None) -> Iterator[Any]:
  """Of the page; made only if there is one."""
  yield table
  yield table.plot()
  yield waterfall(table.model).plot()
  if table.model.config is not None:
    yield work(table.model).plot()
    yield render(count.footprint(table.model))
  if machine is not None:
    yield machine
    yield machine.plot()


def _capacity(table: Table) -> Capacity | None:
  if _DEVICES.value is None:
    return None
  return capacity(
    table.model, devices=_DEVICES.value, hbm=_HBM.value, contexts=table.context,
    weights=_WEIGHTS.value, replicas=table.replicas,
  )  # fmt: skip
