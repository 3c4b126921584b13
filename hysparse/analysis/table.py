"""The bytes of a model's cache as a table: by component and owner layer, with what each is for.

    table = footprint("configs/v41_flash.py", context=1_048_576, batch=8)
    table.per_token                      # 890
    table.frame                          # a DataFrame; a notebook shows `table` itself
    table.plot(), table.to_json(), table.verify()

Every number comes from the description that allocates the cache (cache/layout.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from hysparse_kernels.arguments import whole

from hysparse import config as config_lib
from hysparse.analysis.frames import frame
from hysparse.cache.layout import Component
from hysparse.footprint.count import plain
from hysparse.footprint.kept import Kept
from hysparse.footprint.read import Precision, Source, read
from hysparse.footprint.text import spans

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot
  from hysparse.analysis.measured import Verified

Tier = Literal["resident", "pool", "persistent", "call"]

_DEFAULT_CONTEXT = 131_072
# What a call keeps for itself until it ends is in no tier: it is there while the call runs.
_TIERS: dict[str, tuple[Tier, ...]] = {
  "global": ("resident", "persistent"),
  "bounded": ("resident",),
  "bookkeeping": ("resident",),
  "scratch": ("call",),
}
_SUMMED = ("per_token", "values", "scales", "padding", "replication", "total")
_POOLED = "window_encoder"  # kept for minutes, when its session has ended


@dataclasses.dataclass(frozen=True)
class Line:
  """One component of one layer, of all sequences.

  Attributes:
    component, format, lifetime: as in the layout.
    layer: the owner; None for what a sequence has once.
    tiers: where it can be, see `Table.tier`.
    per_token: bytes that a token of context adds, of one sequence.
    entries: rows of one sequence.
    values: bytes of them without scales.
    scales: bytes of the block scales.
    padding: bytes of rows in pages that are begun but not full.
    replication: bytes of all of these on further replicas.
  """

  component: str
  layer: int | None
  format: str
  lifetime: str
  tiers: tuple[Tier, ...]
  per_token: Fraction
  entries: int
  values: int
  scales: int
  padding: int
  replication: int

  @property
  def total(self) -> int:
    return self.values + self.scales + self.padding + self.replication


@dataclasses.dataclass(frozen=True)
class Table:
  """What the cache of a batch of sequences holds.

  Attributes:
    model: what is counted.
    context: tokens of each sequence.
    batch: sequences.
    replicas: devices that hold the same sequences.
    lines: component by component, layer by layer.
  """

  model: Kept
  context: int
  batch: int
  replicas: int
  lines: tuple[Line, ...]

  @property
  def per_token(self) -> Fraction:
    """Bytes that a token of context adds to one sequence, one replica."""
    return sum((line.per_token for line in self.lines if line.lifetime == "global"), Fraction(0))

  @property
  def page(self) -> int:
    return self.model.layout.block_tokens

  def bytes(self, *, lifetime: str | None = None, component: str | None = None) -> int:
    """All sequences and replicas, padding included, of those lines."""
    return sum(
      line.total
      for line in self.lines
      if lifetime in (None, line.lifetime) and component in (None, line.component)
    )

  def tier(self, tier: Tier) -> int:
    """Bytes of a tier.

    "resident": device memory of active sequences. "pool": windows of the encoder, kept in host
    memory for minutes. "persistent": the global cache, kept on disk for days. "call": what one
    decode step holds until it ends.

    The two stores keep each sequence once and no unfinished page's padding.
    """
    of = [line for line in self.lines if tier in line.tiers]
    if tier in ("pool", "persistent"):
      return sum(line.values + line.scales for line in of)
    return sum(line.total for line in of)

  @property
  def frame(self) -> pandas.DataFrame:
    """The lines as a DataFrame, bytes as whole numbers (per token as float)."""
    return frame(map(_row, self.lines), ["component", "layer"])

  @property
  def components(self) -> pandas.DataFrame:
    """The same summed over the layers that own a component, with its share of the total."""
    return frame(self.summed(), "component")

  def summed(self) -> list[dict[str, Any]]:
    """The rows of `components`."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in self.lines:
      key = (line.component, line.format, line.lifetime, ", ".join(line.tiers))
      row = rows.setdefault(key, {"layers": [], **dict.fromkeys(_SUMMED, 0)})
      row["layers"] += [] if line.layer is None else [line.layer]
      for name in _SUMMED:
        row[name] += getattr(line, name)
    total = sum(row["total"] for row in rows.values())
    return [
      {
        **dict(zip(("component", "format", "lifetime", "tiers"), key, strict=True)),
        **row,
        "layers": spans(sorted(row["layers"])),
        "per_token": plain(row["per_token"]),
        "share": row["total"] / total,
      }
      for key, row in rows.items()
    ]

  @property
  def tiers(self) -> pandas.DataFrame:
    """Bytes of each tier, of all sequences and of one."""
    names: tuple[Tier, ...] = ("resident", "pool", "persistent")
    sizes = {name: self.tier(name) for name in names}
    rows = [
      {"tier": name, "bytes": size, "bytes a sequence": size // self.batch}
      for name, size in sizes.items()
    ]
    return frame(rows, "tier")

  def at(self, context: int) -> Table:
    """The same for sequences of another length."""
    return footprint(self.model, context=context, batch=self.batch, replicas=self.replicas)

  def to_dict(self) -> dict[str, Any]:
    return {
      "model": self.model.name,
      "family": self.model.family,
      "precision": self.model.precision,
      "context": self.context,
      "batch": self.batch,
      "page": self.page,
      "replicas": self.replicas,
      "bytes_per_token": plain(self.per_token),
      "tiers": {tier: self.tier(tier) for tier in ("resident", "pool", "persistent", "call")},
      "lines": [_row(line) for line in self.lines],
    }

  def to_json(self) -> str:
    return json.dumps(self.to_dict(), indent=2)

  def verify(self, **options: Any) -> Verified:
    """Allocates this cache and compares its arrays with the lines; see `measured.verify`."""
    from hysparse.analysis.measured import verify

    return verify(self, **options)

  def plot(self) -> Plot:
    """Bytes a token by owner layer, and bytes of a sequence against its context."""
    from hysparse.analysis.table_plot import plot

    return plot(self)

  def __str__(self) -> str:
    from hysparse.analysis.table_text import text

    return text(self)

  __repr__ = __str__

  def _repr_html_(self) -> str:
    from hysparse.analysis.table_text import html

    return html(self)


def footprint(
  config_or_path: Source,
  *,
  context: int | None = None,
  batch: int = 1,
  precision: Precision = None,
  page: int | None = None,
  replicas: int = 1,
) -> Table:
  """Counts what the cache of `batch` sequences of `context` tokens holds.

  Args:
    config_or_path: a config of ours, a workdir, a released folder, or the config.json of any family
      that is counted (`hysparse.footprint.read`).
    context: tokens of each sequence; by default 131,072, or the longest that the model has.
    precision: formats, see `hysparse.footprint.read`.
    page: tokens in a page of the cache.
    replicas: devices that hold the same sequences: with one key head, tensor parallelism copies the
      cache to every device.

  Raises:
    ConfigError: a model that is not known, or an argument that does not fit it.
  """
  model = read(config_or_path, precision=precision, page=page)
  longest = model.max_positions
  if context is None:
    context = min(_DEFAULT_CONTEXT, longest or _DEFAULT_CONTEXT)
  for name, value in (("context", context), ("batch", batch), ("replicas", replicas)):
    whole(name, value, error=config_lib.ConfigError)
  if longest is not None and context > longest:
    raise config_lib.ConfigError(
      f"context: is {context}; {model.name} has {longest} positions (max_positions)"
    )
  lines = tuple(
    line
    for component in model.layout
    for line in _lines(component, context, batch, model.layout.block_tokens, replicas)
  )
  return Table(model, context, batch, replicas, lines)


def _lines(
  component: Component, context: int, batch: int, page: int, replicas: int
) -> Iterator[Line]:
  rows = component.rows_at(context)
  unfilled = 0
  if component.lifetime == "global":
    unfilled = component.rows_at(-(-context // page) * page) - rows
  scales = sum(part.bytes for part in component.row if part.name == "scales")
  values, padding = component.row_bytes - scales, unfilled * component.row_bytes
  held = batch * (rows * component.row_bytes + padding)
  tiers = _TIERS[component.lifetime]
  for layer in component.layers or (None,):
    yield Line(
      component=component.name,
      layer=layer,
      format=component.format,
      lifetime=component.lifetime,
      tiers=(*tiers, "pool") if component.name == _POOLED else tiers,
      per_token=component.rows_per_token * component.row_bytes,
      entries=rows,
      values=batch * rows * values,
      scales=batch * rows * scales,
      padding=batch * padding,
      replication=(replicas - 1) * held,
    )


def _row(line: Line) -> dict[str, Any]:
  """JSON-ready."""
  return {
    **dataclasses.asdict(line),
    "tiers": ", ".join(line.tiers),
    "per_token": plain(line.per_token),
    "total": line.total,
  }
