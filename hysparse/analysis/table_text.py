"""A table of bytes as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hysparse.analysis import units
from hysparse.footprint import text as text_lib

if TYPE_CHECKING:
  from hysparse.analysis.table import Table

_COLUMNS = ("layers", "format", "lifetime", "per_token", "values", "scales", "padding")


def text(table: Table) -> str:
  """For a terminal: components, then tiers."""
  columns = (*_COLUMNS, "replication", "total")
  head = ("component", *(name.replace("_", " ") for name in columns))
  lines = [head]
  for row in table.summed():
    lines.append((row["component"], *(units.cell(row[name]) for name in columns)))
  shown = text_lib.table(lines, right=range(4, len(head)))
  tiers = [f"{tier}: {table.tier(tier):,} bytes" for tier in ("resident", "pool", "persistent")]
  return "\n\n".join([headline(table), shown, "\n".join(tiers)])


def html(table: Table) -> str:
  """For a notebook: the headline, components, tiers."""
  frame = table.components.drop(columns=["tiers"])
  share = {"share": "{:.1%}".format, "per_token": units.cell}
  whole = dict.fromkeys(("values", "scales", "padding", "replication", "total"), "{:,}".format)
  shown = frame.rename(columns={"per_token": "bytes a token"}).to_html(
    formatters={
      name.replace("per_token", "bytes a token"): form for name, form in (share | whole).items()
    },
    border=0,
  )
  tiers = table.tiers.to_html(formatters=dict.fromkeys(table.tiers, "{:,.0f}".format), border=0)
  return f"<p><b>{headline(table)}</b></p>{shown}{tiers}"


def headline(table: Table) -> str:
  """What is counted, in a line."""
  model = table.model
  many = f"{table.batch:,} x " if table.batch > 1 else ""
  copies = f", {table.replicas} replicas" if table.replicas > 1 else ""
  return (
    f"{model.name} ({model.precision}): {text_lib.number(table.per_token)} bytes a token;"
    f" {many}{table.context:,} tokens in pages of {table.page}{copies}:"
    f" {units.size(table.tier('resident'))} resident"
  )
