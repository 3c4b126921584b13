"""The footprint: golden byte counts, the picture, and a command line that loads almost nothing."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from hysparse import config_file, published
from hysparse.footprint import draw, footprint, render
from hysparse.schedule import parse

ROOT = pathlib.Path(__file__).parents[1]
RELEASED = ROOT / "tests" / "golden" / "hf_configs" / "deepseek-v4.1-flash.json"
SECONDS = 2.0  # what the command line may take, interpreter included

# Runs the module as `python -m` would, in an interpreter that refuses what counting must not need.
GUARDED = """
import runpy, sys

class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.partition(".")[0] in {"grain", "torch", "triton", "flax", "jax", "optax", "orbax"}:
      raise ImportError(f"footprint imports {name}")

sys.meta_path.insert(0, Refuse())
sys.argv = ["footprint", *sys.argv[1:]]
runpy.run_module("hysparse.footprint", run_name="__main__")
"""


def run(*arguments, guarded=True):
  start = ["-c", GUARDED] if guarded else ["-m", "hysparse.footprint"]
  return subprocess.run(
    [sys.executable, *start, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
  )


@pytest.fixture(scope="module")
def released():
  return footprint(published.read(str(RELEASED)))


def test_golden_bytes_of_the_released_model(released):
  counted = released.to_dict()
  expected = json.loads((RELEASED.parent / "expected.json").read_text())["deepseek-v4.1-flash"]
  assert counted["global_bytes_per_token"] == expected["per_token"] == 890
  windows = {c["name"]: c["bytes"] for c in counted["components"] if "window" in c["name"]}
  backbone = windows["window_encoder"] + windows["window_decoder"]
  assert backbone == expected["bounded_windows_backbone"]
  assert windows["window_draft"] == expected["bounded_windows_draft"]
  assert counted["contexts"]["1048576"]["global"] == 890 * 1_048_576


def test_parts_add_up(released):
  counted = released.to_dict()
  lines = counted["components"]
  per_token = sum(c["bytes_per_token"] for c in lines if c["lifetime"] == "global")
  assert per_token == counted["global_bytes_per_token"]
  assert counted["bounded_bytes"] == sum(c["bytes"] for c in lines if c["lifetime"] == "bounded")
  for parts in counted["contexts"].values():
    assert parts.pop("total") == sum(parts.values())


def test_the_report_shows_every_component_and_the_sum(released):
  text = render(released)
  assert str(released.model.config.layers) in text
  for component in released.layout:
    assert component.name in text
  assert any(line.split() == ["total", "890"] for line in text.splitlines())


def test_the_picture_shows_who_reads_whom():
  schedule = parse("swa full/2 reuse*2 swa reuse | full/1+candidates gqa/2 reindex", (0,))
  lines = draw(schedule).splitlines()
  table = [line.split() for line in lines]
  assert table[1] == ["0", "swa", "W", "+", "Engram"]
  assert table[2] == ["1", "full/2", "W", "O", "1", "per", "2", "tokens", "O", "own"]
  assert table[3] == ["2-3", "reuse", "x2", "W", "|", "of", "1", "|", "of", "1"]
  assert table[4] == ["4", "swa", "W", ":", ":"]
  assert "decoder" in lines[6]
  assert table[7][-3:] == ["own,", "publishes", "candidates"]
  assert table[8] == ["7", "gqa/2", ":", "2", "heads", "of", "its", "own", "all"]
  assert table[9][-5:] == ["own", "among", "candidates", "of", "6"]


def test_every_layer_is_in_the_picture():
  schedule = config_file.load(str(ROOT / "configs" / "v41_flash.py")).model.layers
  shown = []
  for line in draw(schedule).splitlines()[1:]:
    span = line.split()[0]
    if span[0].isdigit():
      first, _, last = span.partition("-")
      shown += range(int(first), int(last or first) + 1)
  assert shown == list(range(40))


def test_the_command_is_fast_and_loads_neither_jax_nor_extras():
  began = time.monotonic()
  result = run(RELEASED, "--json")
  took = time.monotonic() - began
  assert result.returncode == 0, result.stderr
  assert json.loads(result.stdout)["global_bytes_per_token"] == 890
  assert took < SECONDS


def test_config_files_with_overrides():
  result = run("--config=configs/v41_flash.py", "--config.model.main_kv=fp8", "--json")
  assert json.loads(result.stdout)["global_bytes_per_token"] == 1490
  script = subprocess.run(
    [sys.executable, "scripts/footprint.py", "--config=configs/v41_flash.py"],
    capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  assert script.stdout.startswith(run(RELEASED, guarded=False).stdout)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["missing.json"], "missing.json: cannot be read: No such file"),
    (["README.md"], "README.md is not a Python file"),
    ([], "0 files given"),
    ([RELEASED, "--config=configs/tiny.py"], "2 files given"),
    ([RELEASED, "--config.model.top_k=3"], "takes no overrides"),
    (["--config=configs/tiny.py", "--config.model.topk=3"], "did you mean model.top_k?"),
    (["--config=configs/tiny.py", "--config.model.schedule=swa reuse"], "layer 1: 'reuse'"),
  ],
)
def test_errors_are_one_line(arguments, message):
  result = run(*arguments, guarded=False)
  assert result.returncode == 2
  assert result.stdout == ""
  (line,) = result.stderr.splitlines()
  assert line.startswith("error: ") and message in line


def test_other_architectures_are_refused_by_name(tmp_path):
  path = tmp_path / "config.json"
  path.write_text('{"architectures": ["LlamaForCausalLM"]}')
  result = run(path)
  assert result.returncode == 2
  assert "LlamaForCausalLM" in result.stderr and len(result.stderr.splitlines()) == 1
