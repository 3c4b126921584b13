"""Sessions on a machine, FLOPs against the context, models beside each other, the command line."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from hysparse.analysis import capacity, compare, footprint, layer_tokens, waterfall, work
from hysparse.config import ConfigError
from hysparse.flops import forward_flops

ROOT = pathlib.Path(__file__).parents[2]
HF = ROOT / "tests" / "golden" / "hf_configs"
FLASH, TINY = ROOT / "configs" / "v41_flash.py", ROOT / "configs" / "tiny.py"
WEIGHTS = 510_286_023_000  # of the released folder, Engram included


def test_sessions_of_a_million_tokens():
  found = capacity(FLASH, devices=16, hbm=80e9, contexts=1 << 20)
  assert found.weights + found.host == WEIGHTS
  assert found.host == 202_758_032_400  # 2 x 384 M rows of 264 bytes
  session = footprint(FLASH, context=1 << 20).tier("resident")
  room = 80e9 * 0.9 - (WEIGHTS - found.host) / 16
  assert found.sessions == 16 * int(room / session)
  half = capacity(FLASH, devices=16, hbm=80e9, contexts=1 << 20, replicas=2)
  assert half.sessions == found.sessions // 2


def test_a_mix_of_contexts():
  mix = {4096: 3, 1 << 20: 1}
  found = capacity(FLASH, devices=8, hbm=141e9, contexts=mix)
  each = {n: footprint(FLASH, context=n).tier("resident") for n in mix}
  mean = 0.75 * each[4096] + 0.25 * each[1 << 20]
  assert found.mean == pytest.approx(mean)
  assert found.sessions == 8 * int(found.room / mean)
  assert found.frame["share"].sum() == 1
  assert "sessions" in str(found) and found.plot()._repr_png_()


def test_a_session_that_fits_on_no_device():
  llama = HF / "llama-3.1-70b.json"
  arguments = {"devices": 2, "contexts": 131_072, "weights": 140e9}
  assert capacity(llama, hbm=105e9, **arguments).sessions == 0  # 43 GB a session, 24 GB of room
  mixed = arguments | {"contexts": {4096: 0.9, 131_072: 0.1}}
  assert capacity(llama, hbm=105e9, **mixed).mean < 24e9
  assert capacity(llama, hbm=105e9, **mixed).sessions == 0
  assert capacity(llama, hbm=141e9, **arguments).sessions == 2


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"devices": 0}, "devices: is 0"),
    ({"devices": 3, "replicas": 2}, "must divide devices"),
    ({"hbm": 10e9}, "weights take"),
    ({"contexts": {}}, "contexts: is {}"),
    ({"contexts": {4096: -1.0}}, "share of 4096: is -1.0"),
    ({"reserve": 1.0}, "reserve: is 1.0"),
    ({"reserve": "a"}, "reserve: is 'a'"),
    ({"hbm": float("inf")}, "hbm: is inf"),
    ({"hbm": -1}, "hbm: is -1"),
    ({"weights": -5.0}, "weights: is -5.0"),
    ({"devices": True}, "devices: is True"),
    ({"contexts": "4096"}, "contexts: is '4096'"),
    ({"contexts": {4096: float("nan")}}, "share of 4096: is nan"),
    ({"contexts": 1 << 21}, "has 1048576 positions"),
  ],
)
def test_machines_that_make_no_sense(changes, message):
  with pytest.raises(ConfigError, match=message):
    capacity(FLASH, **{"devices": 16, "hbm": 80e9, "contexts": 4096, **changes})
  with pytest.raises(ConfigError, match="weights: are not counted"):
    capacity(HF / "deepseek-v3.json", devices=8, hbm=80e9, contexts=4096)


def test_flops_as_the_report_counts_them():
  found = work(FLASH)
  assert 1.20 <= found.growth <= 1.30
  assert round(found.parameters["decode"] / 1e9) == 16
  assert round(found.parameters["prefill"] / 1e9) == 8
  # By hand, at 4,096: experts (7 x 3 x 5120 x 2304 a layer) at a half.
  assert found.flops[4096]["experts"] == 40 * 7 * 3 * 5120 * 2304 * 2 * 0.5
  plain = work(FLASH, weighted=False, contexts=[4096])
  assert plain.flops[4096] == forward_flops(footprint(FLASH).model.config, 4096, start=4095)
  scores = {n: found.flops[n]["indexer"] for n in found.flops}
  assert scores[1 << 20] > 20 * scores[4096]
  assert len(found.frame) == len(found.flops[4096]) + 1 and found.plot()._repr_png_()


def test_work_of_a_prompt():
  config = footprint(TINY).model.config
  found = work(TINY, phase="prefill", contexts=[64, 256], weighted=False)
  for n in (64, 256):
    expected = {part: flops / n for part, flops in forward_flops(config, n).items()}
    assert found.flops[n] == pytest.approx(expected)


def test_replay_halves_the_prefill():
  every = layer_tokens(FLASH, 4096)
  assert every == 40 * 4096
  assert layer_tokens(FLASH, 4096, "replay") / every == pytest.approx(0.516, abs=5e-4)
  assert layer_tokens(FLASH, 100, "replay") == 40 * 100
  with pytest.raises(ConfigError, match="cannot be counted"):
    layer_tokens(FLASH, 4096, "none")


def test_work_is_of_our_models():
  for call in (work, lambda path: layer_tokens(path, 10)):
    with pytest.raises(ConfigError, match="deepseek-v3"):
      call(HF / "deepseek-v3.json")
  with pytest.raises(ConfigError, match="contexts: has 0"):
    work(FLASH, contexts=[0])


def test_models_beside_each_other():
  others = [HF / f"{name}.json" for name in ("deepseek-v4-flash", "llama-3.1-70b")]
  found = compare(FLASH, *others, context=4096)
  assert list(found.frame["bytes_per_token"]) == [890, 3514.25, 327680]
  assert found.frame["times_the_first"].iloc[0] == 1
  assert {table.context for table in compare(FLASH, TINY).tables} == {8192}
  assert found.plot()._repr_png_()
  with pytest.raises(ConfigError, match="1 models given"):
    compare(FLASH)


def test_the_waterfall_of_the_released_model():
  fall = waterfall(FLASH)
  assert fall.steps[0].per_token == 40 * 2 * 64 * 512 * 2
  assert fall.steps[1].per_token == 2 * (38 * 640 + 2 * 512)
  assert fall.steps[2].per_token == 2 * (18 * 640 / 2 + 20 * 640)
  assert fall.steps[3].per_token == 2 * 2.5 * 640
  assert fall.steps[4].per_token == 890
  product = math.prod(fall.factors.values())
  assert fall.steps[0].per_token / product == 890


def run(*arguments):
  command = [sys.executable, "scripts/footprint.py", *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_the_command_line(tmp_path):
  page, picture = tmp_path / "page.html", tmp_path / "picture.png"
  result = run(FLASH, "--context=4096", "--devices=16", f"--html={page}", f"--plot={picture}")
  assert result.returncode == 0, result.stderr
  assert "890 bytes a token" in result.stdout and "sessions" in result.stdout
  text = page.read_text()
  assert text.count("data:image/png;base64,") == 4 and "main_kv" in text
  assert "http" not in text.replace("</", "")  # nothing is fetched
  assert picture.read_bytes().startswith(b"\x89PNG")

  result = run(TINY, f"--compare={HF / 'gemma-3-27b.json'}", "--json")
  assert [table["model"] for table in json.loads(result.stdout)] == ["tiny", "gemma-3-27b"]


@pytest.mark.slow
def test_the_command_line_verifies_and_refuses(tmp_path):
  result = run(f"--config={TINY}", "--config.model.main_kv=fp8", "--verify", "--context=300")
  assert result.returncode == 0 and result.stdout.endswith("equal\n")
  for arguments, message in [
    ([], "no file given"),
    ([TINY, "--plot=x.gif"], "plot: is x.gif"),
    ([TINY, f"--html={tmp_path}/none/x.html"], "is no folder"),
    ([TINY, "--precision=main_kv=fp3"], "precision.main_kv: is 'fp3'"),
    ([TINY, "--context=many"], "context"),
    ([TINY, "--precision=fp8,main_kv=fp8"], "'fp8' has no =format"),
    ([TINY, FLASH, "--verify"], "for one model"),
  ]:
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1
