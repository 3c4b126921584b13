"""Tables and pictures on one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from hysparse.workdir import write_text

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { text-align: right; padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; }
img { max-width: 100%; }
pre { overflow-x: auto; }
"""


def write(path: str | os.PathLike, title: str, parts: Iterable[Any]) -> None:
  """Writes the page, whole or not at all.

  Args:
    path: of the page.
    title: its heading.
    parts: text (shown as it is, in equal-width letters), plots, and whatever else shows itself as
      HTML in a notebook.
  """
  body = "\n".join(map(_shown, parts))
  heading = html.escape(title)
  page = (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
    f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>\n{body}\n</body></html>\n"
  )
  write_text(pathlib.Path(path), page)


def _shown(part: Any) -> str:
  if isinstance(part, str):
    return f"<pre>{html.escape(part)}</pre>"
  if hasattr(part, "_repr_png_"):
    picture = base64.b64encode(part._repr_png_()).decode()
    return f'<p><img alt="" src="data:image/png;base64,{picture}"></p>'
  return part._repr_html_()
