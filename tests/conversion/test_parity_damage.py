"""A damaged checkpoint or expectation never passes: the loader says so or the comparison fails."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import released_folders as folders

import hysparse
from hysparse.conversion import parity, parity_case

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_parity.py"


@pytest.fixture
def folder(tmp_path):
  """A whole case in a folder of its own."""
  return shutil.copytree(folders.GOLDEN / "tiny-text", tmp_path / "case")


def flip(folder: pathlib.Path, name: str, byte: int, bit: int) -> None:
  """Flips one bit of a tensor on disk."""

  def change(tensors: folders.Tensors) -> None:
    dtype, shape, data = tensors[name]
    data = bytearray(data)
    data[byte] ^= 1 << bit
    tensors[name] = (dtype, shape, bytes(data))

  folders.change_shard(folder, name, change)


def looked_up() -> int:
  """Byte 0 of a row of layer 1's Engram table that the first sequence looks up last."""
  with np.load(folders.GOLDEN / "tiny-text" / "expected.npz") as arrays:
    last = arrays["A/resid_positions"][-1]
    return int(arrays["A/engram_hash_ids"][0, last, 1, 0]) * 32


# tensor -> (byte, bit): one of each encoding, and further places.
IN_LAYERS = {
  "layers.0.attn.wkv.weight": (5, 0),  # FP8 code
  "layers.3.attn.wq_b.scale": (1, 0),  # its scale
  "layers.2.ffn.experts.1.w3.weight": (77, 4),  # two FP4 codes
  "layers.2.ffn.experts.1.w2.scale": (0, 0),
  "layers.1.engram.embed.weight": (looked_up(), 0),
  "layers.1.engram.wkv.scale": (0, 0),
  "layers.4.attn_norm.weight": (8, 0),  # BF16, low byte
  "layers.3.attn.compressor.wkv.weight": (8, 6),
  "layers.5.attn.indexer.weights_proj.weight": (9, 6),
  "layers.0.ffn.gate.weight": (6, 6),
  "layers.5.hc_ffn_fn": (2, 7),  # F32, high part of the mantissa
  "layers.2.hc_attn_base": (2, 7),
  "layers.1.attn.attn_sink": (2, 7),
}


EVERYDAY = (list(IN_LAYERS)[1], "layers.4.attn_norm.weight", "layers.5.hc_ffn_fn")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=[] if n in EVERYDAY else pytest.mark.slow) for n in IN_LAYERS],
)
def test_a_flipped_bit_in_a_layer_is_noticed(folder, name):
  flip(folder, name, *IN_LAYERS[name])
  case, loaded = parity_case.read(folder), hysparse.load(folder)
  ours = parity.Outputs({}, parity.run_layers(loaded.config, loaded.state, case, ["exact"]))
  layers = dataclasses.replace(case, expected={})
  report = parity.compare(loaded.config.model, layers, ours, ["exact"])
  layer = name.split(".")[1]
  assert report.failed and not report.ok
  assert any(f"layer{layer}/" in check.name for check in report.failed)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "byte", "bit"),
  [
    ("head.weight", 8, 6),
    ("norm.weight", 8, 0),
    ("mtp.0.main_proj.weight", 4, 0),
    ("mtp.0.confidence_head.proj.weight", 8, 6),
    ("mtp.0.ffn.experts.2.w1.scale", 0, 0),  # expert 0 is chosen by no stored draft
  ],
)
def test_a_flipped_bit_around_the_layers_is_noticed(folder, name, byte, bit):
  flip(folder, name, byte, bit)
  case, loaded = parity_case.read(folder), hysparse.load(folder)
  report = parity.check(loaded.config, loaded.state, case, ["exact"])
  assert report.failed and not report.ok


# --- The command line -----------------------------------------------------------------------------


def run(*argv: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, str(SCRIPT), *argv], capture_output=True, text=True, check=False
  )


def rename(folder: pathlib.Path) -> None:
  def change(tensors: folders.Tensors) -> None:
    tensors["layers.0.attn.wk.weight"] = tensors.pop("layers.0.attn.wkv.weight")

  folders.change_shard(folder, "layers.0.attn.wkv.weight", change)


def reshape(folder: pathlib.Path) -> None:
  def change(tensors: folders.Tensors) -> None:
    dtype, (rows, columns), data = tensors["layers.0.attn.wkv.weight"]
    tensors["layers.0.attn.wkv.weight"] = (dtype, [columns, rows], data)

  folders.change_shard(folder, "layers.0.attn.wkv.weight", change)


def cut(folder: pathlib.Path) -> None:
  path = folder / folders.SHARDS[0]
  path.write_bytes(path.read_bytes()[:-100])


DAMAGE = {
  rename: "layers.0.attn.wkv.weight",
  reshape: "layers.0.attn.wkv.weight is F8_E4M3 [256, 64], must be F8_E4M3 [64, 256]",
  cut: f"{folders.SHARDS[0]}: is cut short",
}


@pytest.mark.parametrize(
  "damage", [cut, *(pytest.param(d, marks=pytest.mark.slow) for d in (rename, reshape))]
)
def test_a_folder_that_cannot_be_loaded_has_status_2(folder, damage):
  damage(folder)
  done = run(f"--case={folder}")
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
  assert DAMAGE[damage] in done.stderr


def test_no_case_has_status_2(tmp_path):
  done = run(f"--case={tmp_path / 'none'}")
  assert done.returncode == 2
  assert done.stderr == f"error: {tmp_path / 'none'}: no such folder; must be a parity case\n"


@pytest.mark.slow
def test_the_script_says_what_passes_and_what_does_not(folder):
  with np.load(folder / "expected.npz") as arrays:
    changed = dict(arrays)
  changed["exact/A/decode_logits"][3, 1, 7] += 1e-4
  np.savez(folder / "expected.npz", **changed)
  done = run(f"--case={folder}", "--mode=exact", "--json")
  assert done.returncode == 1
  told = json.loads(done.stdout)
  assert not told["ok"] and not told["missed"]
  failed = [check for check in told["checks"] if not check["passed"]]
  assert [(check["name"], check["limit"]) for check in failed] == [("exact/A/decode_logits", 1e-5)]
  assert len(told["checks"]) > 50
  assert "A/tokens" in told["inputs"]
  assert "official/B/decode_logits_as_shipped" in told["inputs"]
