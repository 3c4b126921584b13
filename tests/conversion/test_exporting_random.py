"""Random models through the exporter and a reader that knows only the layout's description."""

import pathlib
import shutil

import independent_reader
import ml_dtypes
import numpy as np
import pytest
import random_models
import released_folders as folders
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import config_file
from hysparse.conversion import importing
from hysparse.conversion.exporting import export
from hysparse.conversion.folder import open_folder
from hysparse.conversion.origin import as_read


def imported(path: pathlib.Path, dequantise=None) -> dict:
  return dict(importing.leaves(open_folder(path), dequantise))


def assert_reads(model, arrays, folder: independent_reader.Folder):
  """Names, shapes, dtypes; the right scale; the nearest code; values within half a step."""
  assert folder.entries == independent_reader.expected(folder.config)
  for name, (dtype, _) in folder.entries.items():
    if name.endswith(".scale"):
      continue
    wanted = random_models.values_of(name, model, arrays)
    found = folder.values(name)
    if dtype == "F32":
      np.testing.assert_array_equal(found, wanted, err_msg=name)
    elif dtype == "BF16":
      np.testing.assert_array_equal(found, wanted.astype(ml_dtypes.bfloat16), err_msg=name)
    else:
      exact, scales = wanted.astype(np.float64), folder.scales(name)
      rowwise = dtype == "I8" or ".engram.embed." in name
      best = independent_reader.best_scales(exact, dtype, rowwise)
      np.testing.assert_array_equal(scales, best, err_msg=name)
      codes = independent_reader.encode(exact / scales, dtype)
      np.testing.assert_array_equal(folder.codes(name), codes, err_msg=name)
      error = np.abs(found - exact)
      assert (error <= independent_reader.half_step(exact, scales, dtype)).all(), name
      assert (error > 0).any() or not exact.any(), name  # something was rounded


def test_a_random_model_survives_export_and_the_independent_reader(tmp_path):
  model = random_models.everything()
  arrays = random_models.arrays(model)
  export(model, arrays, tmp_path / "out")
  assert_reads(model, arrays, independent_reader.Folder(tmp_path / "out"))

  # What was rounded once stays: the folder, imported and exported in any form, is itself again.
  assert open_folder(tmp_path / "out").config == as_read(model)
  for name, dequantise in (("codes", None), ("plain", "f32")):
    again = imported(tmp_path / "out", dequantise)
    export(model, again, tmp_path / name, base=tmp_path / "out" if dequantise else None)
    assert folders.read_folder(tmp_path / name) == folders.read_folder(tmp_path / "out")


@st.composite
def models(draw):
  """Schedules and widths unlike the release's."""
  schedule, layers = draw(
    st.sampled_from(
      [
        ("swa", 1),
        ("full/1", 1),
        ("full/3 reuse*3 reindex", 5),
        ("swa full/1+candidates reuse reindex reuse", 5),
        ("full/4 reindex | full/1 reuse", 4),
        ("swa*3 (full/2 reuse)*2", 7),
      ]
    )
  )
  groups, fields = [], {}
  if draw(st.booleans()):
    groups.append(random_models.ENGRAM | {"engram_heads": draw(st.integers(1, 3))})
    fields["engram_layers"] = draw(st.sampled_from([(0,), (layers - 1,)]))
  if draw(st.booleans()):
    drafts = {"draft_layers": draw(st.integers(1, 3)), "draft_target_layers": (layers - 1,)}
    groups.append(random_models.DRAFTS | drafts)
  if draw(st.booleans()):
    groups.append(random_models.VISION)
  fields |= {
    "q_rank": draw(st.sampled_from([8, 33])),
    "o_rank": draw(st.sampled_from([5, 48])),
    "o_groups": draw(st.sampled_from([1, 2])),
    "streams": draw(st.integers(1, 4)),
    "n_experts": draw(st.integers(2, 4)),
  }
  return random_models.config(*groups, schedule=schedule, **fields)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(models(), st.integers(0, 2**31))
def test_other_models_survive_too(tmp_path_factory, model, seed):
  folder = tmp_path_factory.mktemp("fuzz")
  arrays = random_models.arrays(model, seed)
  export(model, arrays, folder / "out", shard_bytes=100_000)
  assert_reads(model, arrays, independent_reader.Folder(folder / "out"))
  export(model, imported(folder / "out"), folder / "again", base=folder / "out")
  assert folders.read_folder(folder / "again") == folders.read_folder(folder / "out")
  shutil.rmtree(folder)


@pytest.mark.slow
def test_the_small_config_survives(tmp_path):
  model = config_file.load(str(pathlib.Path(__file__).parents[2] / "configs" / "small.py")).model
  arrays = random_models.arrays(model)
  export(model, arrays, tmp_path / "out")
  assert_reads(model, arrays, independent_reader.Folder(tmp_path / "out"))


@pytest.mark.parametrize(("case", "dequantise"), [("tiny-text", "bf16"), ("tiny-vision", "f32")])
def test_without_a_base_the_values_come_back(case, dequantise, tmp_path):
  """Codes need not: the largest value of a block, once rounded, may do with half the scale."""
  source = folders.copy(case, tmp_path / "in")
  name = "layers.0.attn.wq_a.weight"

  def change(tensors):  # nothing above half of what its scale allows
    dtype, shape, data = tensors[name]
    codes = np.frombuffer(data, np.uint8)
    tensors[name] = (dtype, shape, np.where(codes & 0x7F > 0x70, codes & 0xF0, codes).tobytes())

  folders.change_shard(source, name, change)
  values = imported(source, dequantise)
  export(open_folder(source).config, values, tmp_path / "out")
  again = imported(tmp_path / "out", dequantise)
  assert again.keys() == values.keys()
  for path, array in values.items():
    np.testing.assert_array_equal(again[path], array, err_msg=path)
  scale = name.replace("weight", "scale")
  before, after = (folders.read_folder(f)[scale] for f in (source, tmp_path / "out"))
  assert before != after
