"""The README's Python runs as it stands there, each block alone."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


def test_there_are_blocks():
  assert len(BLOCKS) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block, monkeypatch):
  monkeypatch.chdir(ROOT)
  exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_links_lead_somewhere():
  text = (ROOT / "README.md").read_text("utf-8")
  links = re.findall(r"\]\(([^)#:]+)\)", text)
  assert links
  assert [link for link in links if not (ROOT / link).exists()] == []
