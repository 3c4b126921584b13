"""Folder to workdir and back, by the command line too: exact, killed, refused, its memory."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import released_folders as folders

from hysparse import checkpoint_arrays, checkpoints, experiment, workdir
from hysparse.checkpoint_arrays import StoredArrays
from hysparse.checkpoints import CheckpointError, Checkpoints
from hysparse.config import Config, ConfigError, DataConfig
from hysparse.conversion import convert, exporting
from hysparse.conversion.folder import open_folder
from hysparse.conversion.load import load
from hysparse.conversion.shards import FolderError
from hysparse.workdir import WorkdirError

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("config.json", "engram_token_map.npy", folders.INDEX, *folders.SHARDS)


def quiet(text: str) -> None:
  assert "\n" not in text


def assert_same_files(found: pathlib.Path, expected: pathlib.Path):
  assert sorted(p.name for p in found.iterdir()) == sorted(FILES)
  for name in FILES:
    assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
  """Workdirs of both golden folders, codes and scales kept."""
  target = tmp_path_factory.mktemp("converted")
  for case in folders.CASES:
    convert.to_workdir(folders.GOLDEN / case, target / case, say=quiet)
  return target


@pytest.mark.parametrize("case", folders.CASES)
def test_there_and_back_is_the_same_folder(case, converted, tmp_path):
  source = folders.GOLDEN / case
  convert.convert(converted / case, tmp_path / "without", say=quiet)
  assert_same_files(tmp_path / "without", source)
  convert.convert(converted / case, tmp_path / "with", base=source, say=quiet)
  assert_same_files(tmp_path / "with", source)


def test_a_converted_workdir_loads_as_its_folder_does(converted):
  for case in folders.CASES:
    found, wanted = load(converted / case), load(folders.GOLDEN / case)
    assert found.config.model == wanted.config.model
    found, wanted = (checkpoints.named(loaded.state) for loaded in (found, wanted))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
      assert found[name].dtype == array.dtype
      np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.slow
def test_dequantised_and_changed_there(tmp_path):
  source = folders.GOLDEN / "tiny-text"
  convert.convert(source, tmp_path / "run", dequantise="bf16", say=quiet)
  convert.convert(tmp_path / "run", tmp_path / "same", base=source, say=quiet)
  assert_same_files(tmp_path / "same", source)

  stored = StoredArrays(tmp_path / "run")
  arrays = {name: stored[name].copy() for name in stored}
  arrays["runs/3/attn/index_keys/wk/weight"] *= 2
  arrays["drafts/layers/ffn/experts/w1"][0, 1, :, 0] = 1.5
  buffers = [name for name in arrays if name.endswith("bias") or name == "token_map"]
  later = {n: checkpoint_arrays.Later(a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()}
  checkpoint_arrays.write(tmp_path / "run", 7, later, buffers)
  convert.convert(tmp_path / "run", tmp_path / "out", base=source, say=quiet)
  before, after = folders.read_folder(source), folders.read_folder(tmp_path / "out")
  assert {name for name in before if before[name] != after.get(name)} == {
    "layers.3.attn.indexer.wk.weight",
    "mtp.0.ffn.experts.1.w1.weight",
    "mtp.0.ffn.experts.1.w1.scale",
  }
  convert.convert(tmp_path / "run", tmp_path / "first", base=source, step=0, say=quiet)
  assert_same_files(tmp_path / "first", source)
  with pytest.raises(CheckpointError, match=r"checkpoint of step 3: is missing; .* has 0, 7$"):
    convert.convert(tmp_path / "run", tmp_path / "none", step=3, say=quiet)


def test_what_a_workdir_keeps_is_enough(tmp_path):
  """Float32 norm weights of Engram, a tokenizer, a weight and its scale in different files."""
  source = folders.copy("tiny-text", tmp_path / "in")
  (source / "tokenizer.json").write_text('{"hysparse": "bytes"}')
  (source / "generation_config.json").write_text("{}")
  index = json.loads((source / folders.INDEX).read_text())
  shards = {file: folders.read_shard(source / file) for file in folders.SHARDS}
  name = "layers.0.engram.q_weight"
  home = index["weight_map"][name]
  shape = shards[home][name][1]
  values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  shards[home][name] = ("F32", shape, values.tobytes())
  moved = next(n for n in shards[home] if n.endswith(".scale"))
  other = next(file for file in folders.SHARDS if file != home)
  shards[other][moved] = shards[home].pop(moved)
  index["weight_map"][moved] = other
  index["metadata"]["total_size"] += values.nbytes // 2
  for file, tensors in shards.items():
    folders.write_shard(source / file, tensors)
  (source / folders.INDEX).write_text(json.dumps(index))

  convert.convert(source, tmp_path / "run", say=quiet)
  convert.convert(tmp_path / "run", tmp_path / "out", say=quiet)
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
    p.name for p in source.iterdir()
  )
  for path in source.iterdir():
    if path.suffix == ".safetensors":
      assert folders.read_shard(tmp_path / "out" / path.name) == folders.read_shard(path)
    else:
      assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
  assert load(tmp_path / "run").tokenizer is not None


@pytest.mark.slow
def test_a_trained_workdir_is_exported(tmp_path):
  model = random_models.config(random_models.ENGRAM, engram_layers=(1,))
  config = Config(model, DataConfig(seq_len=96))
  arrays = {name: jnp.asarray(x) for name, x in random_models.arrays(model).items()}
  buffers = {n: x for n, x in arrays.items() if n.endswith("bias") or n == "token_map"}
  state = {
    "params": {n: x for n, x in arrays.items() if n not in buffers},
    "buffers": buffers,
    "opt_state": [jnp.ones(3)],
    "step": jnp.int32(4),
  }
  manager = Checkpoints(tmp_path / "run", keep=1)
  manager.save(4, state, {"index": 9})
  manager.close()
  workdir.write_experiment(tmp_path / "run", config)
  (tmp_path / "run" / "tokenizer.json").write_text('{"hysparse": "bytes"}')
  told = []
  convert.convert(tmp_path / "run", tmp_path / "out", say=told.append)
  exporting.export(model, arrays, tmp_path / "direct")
  assert folders.read_folder(tmp_path / "out") == folders.read_folder(tmp_path / "direct")
  assert (tmp_path / "out" / "tokenizer.json").exists()
  assert open_folder(tmp_path / "out").config.layers.engram_layers == (1,)
  assert "experiment.json" not in {path.name for path in (tmp_path / "out").iterdir()}
  assert any("step 4" in line for line in told)


def test_no_training_in_a_converted_workdir(converted):
  config = load(converted / "tiny-text").config
  before = sorted((converted / "tiny-text").iterdir())
  with pytest.raises(WorkdirError, match="holds a converted model; training takes a new workdir"):
    experiment.run(config, converted / "tiny-text")
  assert set(before) <= set((converted / "tiny-text").iterdir())


def test_what_does_not_go_together_is_refused(converted, tmp_path):
  source = folders.GOLDEN / "tiny-text"
  for arguments, error, message in (
    ({"base": source}, ConfigError, r"base: is '.*tiny-text'; applies only to .* workdir"),
    ({"step": 3}, ConfigError, r"step: is '3'; applies only to .* workdir"),
    ({"source": converted / "tiny-text", "dequantise": "f32"}, ConfigError,
     r"dequantise: is 'f32'; .* is a workdir"),
    ({"source": tmp_path / "missing"}, FolderError, "missing: does not exist"),
    ({"target": converted}, FolderError, "is not empty"),
  ):  # fmt: skip
    with pytest.raises(error, match=message):
      convert.convert(**{"source": source, "target": tmp_path / "out", "say": quiet} | arguments)
  assert not any(tmp_path.iterdir())


def test_a_flipped_byte_of_a_checkpoint_is_not_exported(tmp_path):
  convert.convert(folders.GOLDEN / "tiny-text", tmp_path / "run", say=quiet)
  files = [path for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  with pytest.raises(CheckpointError):
    convert.convert(tmp_path / "run", tmp_path / "out", say=quiet)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
  ("converted_as", "message"),
  [
    (None, "is None; must hold dtypes"),
    ({"dtypes": ["BF16"]}, "must hold dtypes"),
    ({"dtypes": {"norm.weight": "F16"}}, "says norm.weight is 'F16'; must be BF16$"),
    ({"dtypes": {"norm.weight": ["BF16"]}}, r"says norm.weight is \['BF16'\]; must be BF16$"),
    ({"dtypes": {"other.weight": "F32"}}, "has a dtype of other.weight, which is no tensor"),
  ],
)
def test_a_damaged_record_of_the_conversion_is_one_line(converted, tmp_path, converted_as, message):
  run = shutil.copytree(converted / "tiny-text", tmp_path / "run")
  folders.change_json(run / "experiment.json", lambda record: record.update(converted=converted_as))
  with pytest.raises(WorkdirError, match=rf"experiment\.json: converted .*{message}") as caught:
    convert.convert(run, tmp_path / "out", say=quiet)
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "out").exists()


def test_a_damaged_index_that_was_kept_is_one_line(tmp_path):
  convert.convert(folders.GOLDEN / "tiny-text", tmp_path / "run", say=quiet)
  (tmp_path / "run" / "released" / folders.INDEX).write_text('{"weight_map": 3}')
  with pytest.raises(
    FolderError, match=r"released: model\.safetensors\.index\.json: cannot be"
  ) as e:
    convert.convert(tmp_path / "run", tmp_path / "out", say=quiet)
  assert "\n" not in str(e.value)


# --- Processes -----------------------------------------------------------------------------------

_KILLED = """
import os, pathlib, signal, sys
from hysparse.conversion import convert
from hysparse.conversion.shard_writer import ShardWriter

source, target = map(pathlib.Path, sys.argv[1:])
written, count = ShardWriter.write, [0]

def write(self, name, blocks):
  written(self, name, blocks)
  count[0] += 1
  if count[0] == 200:
    os.kill(os.getpid(), signal.SIGKILL)

ShardWriter.write = write
convert.convert(source, target)
"""


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_that_looks_complete(converted, tmp_path):
  target = tmp_path / "out"
  done = subprocess.run([sys.executable, "-c", _KILLED, converted / "tiny-text", target])
  assert done.returncode == -signal.SIGKILL
  assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
  with pytest.raises(FolderError, match=r"out\.partial: exists: .* was killed"):
    convert.convert(converted / "tiny-text", target, say=quiet)


def test_a_stopped_import_leaves_nothing(tmp_path, monkeypatch):
  read, count = convert.read_leaf, [0]

  def stop(*arguments):
    count[0] += 1
    if count[0] == 50:
      raise KeyboardInterrupt
    return read(*arguments)

  monkeypatch.setattr(convert, "read_leaf", stop)
  with pytest.raises(KeyboardInterrupt):
    convert.convert(folders.GOLDEN / "tiny-text", tmp_path / "run", say=quiet)
  assert not any(tmp_path.iterdir())


def run(*arguments: str) -> subprocess.CompletedProcess:
  command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *arguments]
  return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_line(tmp_path):
  source = folders.GOLDEN / "tiny-text"
  done = run(f"--source={source}", f"--target={tmp_path / 'run'}", "--dequantise=f32")
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.splitlines()[-1] == f"{tmp_path / 'run'}: done"
  assert {str(s.dtype) for s in StoredArrays(tmp_path / "run").specs.values()} == {
    "float32",
    "int32",
  }
  again = run(f"--source={source}", f"--target={tmp_path / 'run'}")
  assert (again.returncode, again.stdout) == (2, "")
  assert again.stderr == (
    f"error: {tmp_path / 'run'}: is not empty; a conversion writes to a new folder\n"
  )


_MEASURE = """
import pathlib, sys, threading, time
from hysparse.conversion import convert

def anonymous():
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

source, target = map(pathlib.Path, sys.argv[1:])
peak = 0.0

def watch():
  global peak
  while True:
    peak = max(peak, anonymous())
    time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
convert.convert(source, target, say=lambda text: None)
print(peak)
"""


def peak_memory(source, target) -> float:
  """MB that a process of its own takes to convert."""
  command = [sys.executable, "-c", _MEASURE, source, target]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return float(done.stdout.splitlines()[-1])


# MB that a large model may take beyond its largest leaf and what a small one takes: chunks of 4 MB
# on their way and small arrays read together (measured 29).
AROUND_A_LEAF = 48


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("schedule", ["full/1*32", "full/1 reuse*31"], ids=["many", "stacked"])
def test_memory_is_that_of_one_leaf(tmp_path, schedule):
  rng, sizes = np.random.default_rng(0), {}
  for name, width in (("small", 32), ("large", 1024)):
    model = random_models.config(
      schedule=schedule, d_model=512, expert_dim=width, n_experts=32, streams=1,
    )  # fmt: skip
    arrays = {}
    for leaf in exporting.tensors_lib.leaves(model):
      if leaf.is_quantised:
        codes = rng.integers(0, 0x70, (*leaf.stack, *leaf.codes_shape), dtype=np.uint8)
        arrays[f"{leaf.path}/codes"] = codes
        arrays[f"{leaf.path}/scales"] = np.full((*leaf.stack, *leaf.scales_shape), 120, np.uint8)
      else:
        arrays[leaf.path] = np.ones(leaf.model_shape, np.float32)
    exporting.export(model, arrays, tmp_path / name)
    sizes[name] = sum(x.nbytes for x in arrays.values()) / 2**20
    largest = max(x.nbytes for x in arrays.values()) / 2**20
    del arrays
  allowed = largest * 17 / 16 + AROUND_A_LEAF  # a scale byte for 16 of codes
  assert sizes["large"] > 2 * allowed
  peaks = {}
  for name in sizes:
    run, out = tmp_path / f"{name}-run", tmp_path / f"{name}-out"
    peaks[name] = [peak_memory(tmp_path / name, run), peak_memory(run, out)]
  for small, large in zip(peaks["small"], peaks["large"], strict=True):
    assert large - small < allowed, peaks
  assert folders.read_folder(tmp_path / "large-out") == folders.read_folder(tmp_path / "large")


def test_a_kept_index_cannot_lead_out_of_the_target(tmp_path):
  convert.convert(folders.GOLDEN / "tiny-text", tmp_path / "run", say=quiet)
  index = tmp_path / "run" / "released" / "model.safetensors.index.json"
  index.write_text(index.read_text().replace(folders.SHARDS[0], "../" + folders.SHARDS[0]))
  with pytest.raises(FolderError, match="which is no file name"):
    convert.convert(tmp_path / "run", tmp_path / "out", say=quiet)
  assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_the_root_is_no_target():
  with pytest.raises(FolderError, match="cannot be a target"):
    convert.convert(folders.GOLDEN / "tiny-text", pathlib.Path("/"), say=quiet)
