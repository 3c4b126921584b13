"""Notebooks are committed without outputs; that they run is tested by pytest itself (--nbmake)."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
  assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stripped(path):
  cells = json.loads(path.read_text())["cells"]
  assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
  for cell in cells:
    if cell["cell_type"] == "code":
      assert not cell["outputs"] and cell["execution_count"] is None
