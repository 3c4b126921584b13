"""`hysparse.load`: released folders, trained and converted workdirs, and what is neither."""

import dataclasses
import functools
import logging
import mmap
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import released_folders as folders
import small
from flax import nnx
from hysparse_kernels.formats import Quantised

import hysparse
from hysparse import checkpoint_arrays, checkpoints, config_file, tokenizer, workdir
from hysparse.checkpoint_arrays import Later
from hysparse.checkpoints import CheckpointError, Checkpoints
from hysparse.config import ConfigError
from hysparse.conversion import importing, load
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.folder import open_folder
from hysparse.conversion.shards import FolderError
from hysparse.nn.batch import Batch
from hysparse.nn.host_table import HostTable
from hysparse.nn.model import abstract
from hysparse.training.losses import loss_fn
from hysparse.training.state import Trainer

TINY = folders.GOLDEN / "tiny-text"


@functools.cache
def released(case: str = "tiny-text", **options) -> hysparse.Loaded:
  return hysparse.load(folders.GOLDEN / case, **options)


def leaves_of(state: nnx.State) -> dict:
  return {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(state)}


def assert_same(found, expected):
  assert type(found) is type(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# --- Released folders ----------------------------------------------------------------------------


def assert_leaves(loaded: hysparse.Loaded, expected: dict) -> None:
  """The state holds what a reader of the folder gives, on the device."""
  found = leaves_of(loaded.state)
  assert found.keys() == expected.keys()
  for path, value in expected.items():
    assert isinstance(found[path], Quantised if isinstance(value, Quantised) else jax.Array), path
    parts = zip(jax.tree.leaves(found[path]), jax.tree.leaves(value), strict=True)
    for a, b in parts:
      assert a.dtype == b.dtype, path
      np.testing.assert_array_equal(np.asarray(a), b, err_msg=path)


@pytest.mark.parametrize(
  ("case", "dequantise"), [("tiny-text", None), ("tiny-text", "f32"), ("tiny-vision", None)]
)
def test_a_released_folder(case, dequantise):
  loaded = released(case, dequantise=dequantise)
  folder = open_folder(folders.GOLDEN / case)
  assert loaded.config.model == folder.config and loaded.tokenizer is None
  assert loaded.config.train.numerics == "exact"
  graphdef, like = abstract(loaded.config)
  assert loaded.graphdef == graphdef
  assert_leaves(loaded, dict(importing.leaves(folder, dequantise)))
  if dequantise == "f32":  # what training keeps
    for path, value in leaves_of(loaded.state).items():
      kept = leaves_of(like)[path]
      assert (value.shape, value.dtype) == (kept.shape, kept.dtype), path


BATCH = Batch.of(jnp.asarray(np.random.default_rng(0).integers(0, 500, (1, 12)), jnp.int32))


def tables_of(loaded: hysparse.Loaded) -> list:
  return [x for path, x in leaves_of(loaded.state).items() if path.endswith("engram/table")]


def test_engram_with_its_table_on_the_host_gives_the_same_streams():
  device, host = released(dequantise=None), released(engram="host")
  assert [type(x) for x in tables_of(device)] == [Quantised] * 2
  assert [type(x) for x in tables_of(host)] == [HostTable] * 2
  assert isinstance(tables_of(host)[0].codes.base, mmap.mmap)
  streams = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 4, 256)), jnp.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def remembered(graphdef, state):
    model = nnx.merge(graphdef, state)
    return model.layer(1).remember(streams, model.inputs(BATCH))

  found, expected = (remembered(x.graphdef, x.state) for x in (host, device))
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.abs(found[0] - streams).max() > 0.1


@pytest.mark.slow
def test_tables_on_the_host_give_the_same_logits():
  run = jax.jit(hysparse.forward, static_argnums=0)
  loaded = released(dequantise=None), released(engram="host")
  np.testing.assert_array_equal(*(run(x.graphdef, x.state, BATCH).logits_BxNxV for x in loaded))


def test_auto_moves_tables_that_are_too_large(monkeypatch):
  table = list(tensors_lib.leaves(open_folder(TINY).config))
  paths = {"runs/0/engram/table", "runs/1/engram/table"}
  values = (660 + 864) * 32
  for dequantise, size in ((None, values * 33 / 32), ("bf16", 2 * values), ("f32", 4 * values)):
    for memory, moved in ((2 * size + 1, set()), (2 * size - 1, paths)):
      monkeypatch.setattr(load, "_device_bytes", lambda memory=memory: memory)
      assert load._tables_on_host(table, dequantise, "auto") == moved
      assert load._tables_on_host(table, dequantise, "device") == set()
      assert load._tables_on_host(table, dequantise, "host") == paths
  assert load.TABLE_SHARE == 0.5
  monkeypatch.undo()
  assert 1 << 30 < load._device_bytes() < 1 << 50


def test_tokenizer_and_numerics(tmp_path):
  folder = folders.copy("tiny-text", tmp_path / "model")
  tokenizer.ByteTokenizer().save(folder)
  loaded = hysparse.load(folder, numerics="official")
  assert loaded.tokenizer.vocab_size == 259
  assert loaded.config.train.numerics == "official"
  assert loaded.graphdef != released(dequantise=None).graphdef


def test_problems_of_a_folder_are_told(tmp_path):
  folder = folders.copy("tiny-text", tmp_path / "model")
  (folder / folders.SHARDS[0]).unlink()
  (folder / "engram_token_map.npy").unlink()
  with pytest.raises(FolderError) as caught:
    hysparse.load(folder)
  assert len(caught.value.problems) == 2


@pytest.mark.parametrize("alignment", [1, 2, 8, 48, 1024, 4096])
@pytest.mark.parametrize("positions", [8, 100, 4096, 1 << 20])
def test_the_other_groups_are_legal_for_any_model(alignment, positions):
  model = config_file.load(str(folders.GOLDEN.parents[1] / "configs" / "tiny.py")).model
  model = dataclasses.replace(
    model, schedule=f"swa full/{alignment} reuse", candidate_blocks=0, engram_layers=(),
    max_positions=positions,
  )  # fmt: skip
  if alignment > positions:
    with pytest.raises(ConfigError, match="max_positions"):
      load.experiment_of(model)
  else:
    assert load.experiment_of(model).model == model


# --- Workdirs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A workdir as training leaves it, with two checkpoints; (folder, config, states by step)."""
  path = tmp_path_factory.mktemp("trained")
  config = small.config("swa full/2 reuse", engram_layers=(1,), train={"numerics": "kvquant"})
  graphdef, like = abstract(config)
  trainer = Trainer(config, graphdef, like, loss_fn)
  store = Checkpoints(path, keep=2)
  states = {step: small.model(config, seed=step)[1] for step in (1, 2)}
  for step, state in states.items():
    store.save(step, trainer.init(state), {"index": step})
  store.close()
  workdir.write_experiment(path, config)
  tokenizer.ByteTokenizer().save(path)
  return path, config, states


@pytest.mark.slow
def test_a_trained_workdir(trained):
  path, config, states = trained
  graphdef, _ = small.model(config, seed=1)
  loaded = hysparse.load(path)
  assert loaded.config == config and loaded.graphdef == graphdef
  assert loaded.tokenizer.vocab_size == 259
  found, expected = leaves_of(loaded.state), leaves_of(states[2])
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert_same(found[name], value)
  assert hysparse.load(path, numerics="exact").config.train.numerics == "exact"


def test_a_damaged_checkpoint_is_passed_over_and_left_alone(trained, tmp_path, caplog):
  path, _, states = trained
  copy = shutil.copytree(path, tmp_path / "copy")
  for file in (copy / "checkpoints" / "2" / "state").rglob("*"):
    if file.is_file() and file.stat().st_size > 10_000:
      file.write_bytes(file.read_bytes()[:-1000])
  with caplog.at_level(logging.WARNING):
    loaded = hysparse.load(copy)
  assert_same(leaves_of(loaded.state)["head/weight"], leaves_of(states[1])["head/weight"])
  (record,) = [r.getMessage() for r in caplog.records if "instead" in r.getMessage()]
  assert "loading checkpoint 1 instead" in record and "\n" not in record
  assert checkpoints.steps_in(copy) == [1, 2]
  shutil.rmtree(copy / "checkpoints" / "1" / "state")
  with pytest.raises(CheckpointError) as caught:
    hysparse.load(copy)
  assert "\n" not in str(caught.value)


def test_a_workdir_whose_config_has_other_shapes(trained, tmp_path):
  path, config, _ = trained
  copy = shutil.copytree(path, tmp_path / "copy")
  model = dataclasses.replace(config.model, expert_dim=48)
  workdir.write_experiment(copy, dataclasses.replace(config, model=model))
  with pytest.raises(CheckpointError, match=r"ffn/experts/w1 is .*; this model has") as caught:
    hysparse.load(copy)
  assert "\n" not in str(caught.value)


def test_plain_tables_of_a_workdir_stay_on_the_device(trained):
  with pytest.raises(ConfigError, match="engram: is 'host'"):
    hysparse.load(trained[0], engram="host")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
  """A workdir with the leaves of the released folder, codes and scales kept."""
  path = tmp_path_factory.mktemp("converted")
  folder = open_folder(TINY)
  arrays = {}
  for name, leaf in importing.leaves(folder):
    parts = {name: leaf}
    if isinstance(leaf, Quantised):
      parts = {f"{name}/codes": leaf.codes, f"{name}/scales": leaf.scales}
    arrays |= {n: Later(x.shape, x.dtype, lambda x=x: x) for n, x in parts.items()}
  checkpoint_arrays.write(path, 0, arrays, buffers={"token_map"})
  workdir.write_experiment(path, load.experiment_of(folder.config))
  return path


def test_a_converted_workdir_is_the_released_folder(converted):
  loaded, expected = hysparse.load(converted), released(dequantise=None)
  assert loaded.config == expected.config and loaded.graphdef == expected.graphdef
  assert_leaves(loaded, dict(importing.leaves(open_folder(TINY))))


def test_a_converted_workdir_dequantised(converted):
  loaded = hysparse.load(converted, dequantise="f32")
  assert_leaves(loaded, dict(importing.leaves(open_folder(TINY), "f32")))


def test_tables_of_a_converted_workdir_on_the_host(converted):
  found = tables_of(hysparse.load(converted, engram="host"))
  mapped = tables_of(released(engram="host"))
  for table, expected in zip(found, mapped, strict=True):
    rows = jnp.arange(table.shape[0])
    np.testing.assert_array_equal(table.lookup(rows), expected.lookup(rows))


# --- Neither -------------------------------------------------------------------------------------


def test_what_is_neither_is_refused_in_one_line(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "config.json").write_text('{"model_type": "x"}')
  workdir.write_experiment(tmp_path / "empty" / "..", small.config())
  for path, message in (
    (tmp_path / "none", "is no folder"),
    (tmp_path / "empty", "holds neither experiment.json .* nor config.json"),
    (tmp_path / "other", "holds neither experiment.json .* nor config.json"),
  ):
    with pytest.raises(FolderError, match=message) as caught:
      hysparse.load(path)
    assert "\n" not in str(caught.value)
  with pytest.raises(CheckpointError, match="has no checkpoint yet"):
    hysparse.load(tmp_path)


@pytest.mark.parametrize("option", [{"dequantise": "fp16"}, {"engram": "disk"}, {"numerics": "x"}])
def test_options_are_checked(option):
  (name,) = option
  with pytest.raises(ValueError, match=f"{name}: is "):
    hysparse.load(TINY, **option)
