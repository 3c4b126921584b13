"""A footprint in text: the schedule as a picture, then the bytes of every component."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from hysparse import config as config_lib
from hysparse import schedule as schedule_lib
from hysparse.cache import layout as layout_lib
from hysparse.footprint.count import Footprint
from hysparse.footprint.entry_formats import FORMATS

_OWNS, _READS, _PASSES, _NOTHING = "O", "|", ":", " "
_LEGEND = "W window keys   O makes its own   | reads the layer above that does   : passes them by"


def render(footprint: Footprint) -> str:
  """The whole report of `python -m hysparse.footprint`."""
  tables = [_growing(footprint), _fixed(footprint), _totals(footprint)]
  return "\n\n".join([*_head(footprint), *filter(None, tables)])


def _head(footprint: Footprint) -> list[str]:
  """Our models as a picture, others by name and where their format is from."""
  model = footprint.model
  if model.config is None:
    return [f"{model.name} ({model.family}), {model.precision}: {FORMATS[model.precision].source}"]
  layers = model.config.layers
  return [str(layers), draw(layers), _LEGEND, _prefill(model.config)]


def draw(schedule: schedule_lib.Schedule) -> str:
  """One line per run of equal layers, with who reads whom:

      layer  mode      window  entries           selection
          2  full/2    W       O 1 per 2 tokens  O own
        3-7  reuse x5  W       | of 2            | of 2

  O makes entries or a selection, the | below it read them, a : passes them by.
  """
  lines = [("layer", "mode", "window", "entries", "selection", "")]
  for first, count in schedule.runs():
    if first == schedule.decoder_start:
      lines.append(("", "-- decoder --", "", "", "", ""))
    spec = schedule[first]
    lines.append(
      (
        _span(range(first, first + count)),
        str(spec) if count == 1 else f"{spec} x{count}",
        "W" if spec.has_window else "",
        _entries(schedule, first),
        _selection(schedule, first),
        "+ Engram" if spec.engram else "",
      )
    )
  return table(lines, right=(0,))


def _entries(schedule: schedule_lib.Schedule, layer: int) -> str:
  spec = schedule[layer]
  if spec.is_source:
    return f"{_OWNS} 1 per {'token' if spec.ratio == 1 else f'{spec.ratio} tokens'}"
  if spec.kv_source is not None:
    return f"{_READS} of {spec.kv_source}"
  passes = _passes(layer, (s.kv_source for s in schedule.layers[layer:]))
  if spec.has_window:
    return passes
  return f"{passes} {'all' if spec.kv_heads is None else spec.kv_heads} heads of its own"


def _selection(schedule: schedule_lib.Schedule, layer: int) -> str:
  spec = schedule[layer]
  if spec.has_indexer:
    pool = f" among candidates of {schedule.candidate_source}"
    role = {"source": ", publishes candidates", "pool": pool, None: ""}[spec.candidate_role]
    return f"{_OWNS} own{role}"
  if spec.mode == "dense":
    read = any(s.index_source == layer for s in schedule.layers[layer + 1 :])
    return f"{_OWNS} all, publishes its best" if read else f"{_NOTHING} all"
  if spec.index_source is not None:
    return f"{_READS} of {spec.index_source}"
  passes = _passes(layer, (s.index_source for s in schedule.layers[layer:]))
  return passes if spec.has_window else f"{passes} all"


def _passes(layer: int, sources: Iterable[int | None]) -> str:
  """Whether a layer from here on still reads a source above."""
  return _PASSES if any(s is not None and s < layer for s in sources) else _NOTHING


def _prefill(config: config_lib.ModelConfig) -> str:
  reason = config.layers.replay_unsupported_reason()
  if reason is None:
    return f"Prefill can run the decoder on the last {config.window} tokens of a prompt only."
  return f"Prefill runs every layer on the whole prompt: {reason}."


def _growing(footprint: Footprint) -> str:
  lines = [
    ("global cache", "layers", "format", "bytes an entry", "entries a token", "bytes a token")
  ]
  for c in footprint.layout.of("global"):
    per_token = number(c.bytes_per_token)
    rate = f"{len(c.layers)} x {c.rows_per_token}"
    lines.append((c.name, spans(c.layers), c.format, _bytes_of_row(c), rate, per_token))
  lines.append(("total", "", "", "", "", number(footprint.global_bytes_per_token)))
  return table(lines, right=(3, 4, 5))


def _fixed(footprint: Footprint) -> str:
  lines = [("does not grow", "layers", "format", "bytes a row", "rows", "bytes")]
  for lifetime in ("bounded", "scratch", "bookkeeping"):
    for c in footprint.layout.of(lifetime):
      rows, total = f"{c.copies} x {c.rows}", number(c.bytes_at(0))
      if c.rows_per_token:
        rows, total = f"1 in {1 / c.rows_per_token} tokens", ""
      lines.append((c.name, spans(c.layers), c.format, _bytes_of_row(c), rows, total))
    if lifetime == "bounded" and footprint.bounded_bytes:
      lines.append(("total bounded", "", "", "", "", number(footprint.bounded_bytes)))
  return table(lines, right=(3, 4, 5)) if len(lines) > 1 else ""


def _totals(footprint: Footprint) -> str:
  lines = []
  for tokens in footprint.contexts:
    parts = footprint.bytes_at(tokens)
    if not lines:
      lines.append(("context", *parts))
    lines.append((number(tokens), *map(number, parts.values())))
  return table(lines, right=range(len(lines[0])))


def _bytes_of_row(component: layout_lib.Component) -> str:
  if len(component.row) == 1:
    return str(component.row_bytes)
  return " + ".join(str(part.bytes) for part in component.row) + f" = {component.row_bytes}"


def spans(layers: Sequence[int]) -> str:
  """2, 8, 14, 20-39."""
  spans: list[list[int]] = []
  for layer in layers:
    if spans and layer == spans[-1][-1] + 1:
      spans[-1].append(layer)
    else:
      spans.append([layer])
  return ", ".join(_span(span) for span in spans)


def _span(layers: Sequence[int]) -> str:
  return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def number(value: int | Fraction) -> str:
  return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def table(lines: Sequence[Sequence[str]], right: Iterable[int]) -> str:
  """Aligned columns, the ones in `right` to the right."""
  right = set(right)
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
