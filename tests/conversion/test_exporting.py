"""Exports: bit for bit, only what changed, the files themselves, and a reader of its own."""

import collections
import json
import pathlib
import resource
import shutil

import independent_reader
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import released_folders as folders
import safetensors
from hysparse_kernels.formats import Quantised

from hysparse import published
from hysparse.config import ConfigError
from hysparse.conversion import exporting, importing
from hysparse.conversion.exporting import export
from hysparse.conversion.folder import open_folder
from hysparse.conversion.origin import Origin, as_read
from hysparse.conversion.shard_writer import Entry, ShardWriter, header, in_shards
from hysparse.conversion.shards import FolderError
from hysparse.nn.host_table import HostTable

FILES = ("config.json", "engram_token_map.npy", folders.INDEX, *folders.SHARDS)


def imported(path: pathlib.Path, dequantise=None) -> dict:
  """The leaves of a folder by name."""
  return dict(importing.leaves(open_folder(path), dequantise))


def assert_same_files(found: pathlib.Path, expected: pathlib.Path):
  assert sorted(p.name for p in found.iterdir()) == sorted(FILES)
  for name in FILES:
    assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def assert_same_model(path: pathlib.Path, model):
  """Equal but for fields of mechanisms that are off, and the bar, which has no published field."""
  assert open_folder(path).config == as_read(model)


# --- The released model ------------------------------------------------------------------------


def test_the_released_model_is_listed_to_the_byte():
  values = json.loads(folders.RELEASED_CONFIG.read_text())
  listing = exporting.listing(published.from_published(values))
  assert len(listing) == 96_085
  assert sum(entry.nbytes for entry in listing.values()) == 510_286_023_000
  assert {n: tuple(e) for n, e in listing.items()} == independent_reader.expected(values)
  found = collections.Counter()
  for entry in listing.values():
    found[entry.dtype] += entry.nbytes
  assert found == {
    "I8": 278_585_671_680,
    "F8_E4M3": 204_015_223_296,
    "F8_E8M0": 23_563_015_184,
    "BF16": 3_952_883_712,
    "F32": 169_229_128,
  }


# --- Golden folders ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", folders.CASES)
def test_import_then_export_is_bit_for_bit(case, tmp_path):
  source, model = folders.GOLDEN / case, open_folder(folders.GOLDEN / case).config
  arrays = imported(source)
  export(model, arrays, tmp_path / "with", base=source)
  assert_same_files(tmp_path / "with", source)

  export(model, arrays, tmp_path / "without")
  assert folders.read_folder(tmp_path / "without") == folders.read_folder(source)
  written = json.loads((tmp_path / "without" / folders.INDEX).read_text())
  stored = json.loads((source / folders.INDEX).read_text())
  assert written["metadata"] == stored["metadata"]
  assert written["weight_map"].keys() == stored["weight_map"].keys()
  assert open_folder(tmp_path / "without").config == model
  assert (tmp_path / "without" / FILES[1]).read_bytes() == (source / FILES[1]).read_bytes()


@pytest.mark.parametrize(("case", "dequantise"), [("tiny-text", "bf16"), ("tiny-vision", "f32")])
def test_equal_values_get_the_bytes_of_the_base(case, dequantise, tmp_path):
  source = folders.GOLDEN / case
  export(open_folder(source).config, imported(source, dequantise), tmp_path / "out", base=source)
  assert_same_files(tmp_path / "out", source)


def test_only_what_changed_is_written_anew(tmp_path):
  source, model = folders.GOLDEN / "tiny-text", open_folder(folders.GOLDEN / "tiny-text").config
  arrays = imported(source, "f32")
  arrays["runs/1/ffn/experts/w2"][0, 3] *= -0.75
  arrays["runs/2/attn/wq_b/weight"][0, 5, 7] += 100.0
  arrays["norm/weight"][3] = 2.5
  arrays["runs/0/engram/table"][0, -1, -1] = 300.0
  export(model, arrays, tmp_path / "out", base=source)
  before, after = folders.read_folder(source), folders.read_folder(tmp_path / "out")
  assert before.keys() == after.keys()
  changed = {name for name in before if before[name] != after[name]}
  assert {name.removesuffix("scale").removesuffix("weight") for name in changed} == {
    "layers.1.ffn.experts.3.w2.",
    "layers.2.attn.wq_b.",
    "norm.",
    "layers.0.engram.embed.",
  }
  for name in ("config.json", folders.INDEX):
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
  found = independent_reader.Folder(tmp_path / "out")
  assert found.values("norm.weight")[3] == 2.5
  assert abs(found.values("layers.2.attn.wq_b.weight")[7, 5] - 100) < 100 / 16


def test_a_weight_and_its_scale_may_lie_in_different_files(tmp_path):
  source = folders.copy("tiny-text", tmp_path / "in")
  index = json.loads((source / folders.INDEX).read_text())
  shards = {file: folders.read_shard(source / file) for file in folders.SHARDS}
  scales = [n for n in index["weight_map"] if n.endswith(".scale")][::3]
  for name in scales:
    place = index["weight_map"][name]
    other = next(file for file in folders.SHARDS if file != place)
    shards[other][name] = shards[place].pop(name)
    index["weight_map"][name] = other
  for file, tensors in shards.items():
    folders.write_shard(source / file, tensors)
  (source / folders.INDEX).write_text(json.dumps(index))
  model = open_folder(source).config
  for name, dequantise in (("codes", None), ("plain", "bf16")):
    export(model, imported(source, dequantise), tmp_path / name, base=source)
    for file in folders.SHARDS:
      assert folders.read_shard(tmp_path / name / file) == folders.read_shard(source / file)
    assert (tmp_path / name / folders.INDEX).read_bytes() == (source / folders.INDEX).read_bytes()


def test_norm_weights_of_engram_stay_float32_where_they_are(tmp_path):
  source = folders.copy("tiny-text", tmp_path / "in")
  names = [f"layers.{i}.engram.{n}" for i in (0, 1) for n in ("q_weight", "k_weight")]
  rng = np.random.default_rng(0)

  def widen(tensors):
    for name in set(names) & tensors.keys():
      shape = tensors[name][1]
      tensors[name] = ("F32", shape, rng.standard_normal(shape).astype(np.float32).tobytes())

  for name in names:
    folders.change_shard(source, name, widen)
  model = open_folder(source).config
  for name, dequantise in (("codes", None), ("plain", "f32")):
    export(model, imported(source, dequantise), tmp_path / name, base=source)
    assert folders.read_folder(tmp_path / name) == folders.read_folder(source)
  export(model, imported(source), tmp_path / "usual")
  assert {folders.read_folder(tmp_path / "usual")[name][0] for name in names} == {"BF16"}


def test_spellings_of_the_base_are_kept(tmp_path):
  source = folders.copy("tiny-text", tmp_path / "in")
  index = json.loads((source / folders.INDEX).read_text())

  def spelled(name: str) -> str:
    return "model." + name.replace("attn.", "self_attn.", 1).replace(".scale", ".weight_scale_inv")

  for file in folders.SHARDS:
    tensors = folders.read_shard(source / file)
    folders.write_shard(source / file, {spelled(n): value for n, value in tensors.items()})
  index["weight_map"] = {spelled(n): file for n, file in index["weight_map"].items()}
  (source / folders.INDEX).write_text(json.dumps(index))
  export(open_folder(source).config, imported(source), tmp_path / "out", base=source)
  assert folders.read_folder(tmp_path / "out") == folders.read_folder(source)
  assert (tmp_path / "out" / folders.INDEX).read_bytes() == (source / folders.INDEX).read_bytes()


def test_a_base_of_another_model_gives_what_it_can(tmp_path):
  """Here with one layer less: its other tensors are of equal name and value."""
  source = folders.GOLDEN / "tiny-text"
  model = open_folder(source).config
  arrays = imported(source, "bf16")
  other = folders.copy("tiny-text", tmp_path / "other")
  folders.change_json(
    other / "config.json",
    lambda values: values["text_config"].update(max_position_embeddings=256),
  )
  export(model, arrays, tmp_path / "out", base=other)
  assert folders.read_folder(tmp_path / "out") == folders.read_folder(source)
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  assert values["text_config"]["max_position_embeddings"] == model.max_positions
  assert open_folder(tmp_path / "out").config == model


def test_the_library_reads_the_headers(tmp_path):
  model = random_models.everything()
  export(model, random_models.arrays(model), tmp_path / "out", shard_bytes=150_000)
  listing, seen = exporting.listing(model), {}
  for path in (tmp_path / "out").glob("*.safetensors"):
    with safetensors.safe_open(path, framework="np") as file:
      assert file.metadata() == {"format": "pt"}
      for name in list(file.keys()):
        part = file.get_slice(name)
        seen[name] = Entry(part.get_dtype(), tuple(part.get_shape()))
  assert seen == listing
  assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


def test_files_are_filled_in_order():
  entries = {c: Entry("F32", (n,)) for c, n in zip("abcdef", (2, 1, 9, 1, 1, 1), strict=True)}
  places = in_shards(entries, 12)
  numbers = [int(places[c][6:11]) for c in "abcdef"]
  assert numbers == [1, 1, 2, 3, 3, 3]  # c alone is larger than a file
  assert set(places.values()) == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
  front, starts = header({"b": Entry("F32", (1,)), "a": Entry("BF16", (3,))})
  assert len(front) % 8 == 0 and int.from_bytes(front[:8], "little") == len(front) - 8
  assert starts == {"b": len(front), "a": len(front) + 4}


# --- States ------------------------------------------------------------------------------------


def test_a_state_with_a_table_on_the_host(tmp_path):
  from flax import nnx

  source = folders.GOLDEN / "tiny-text"
  folder, flat = open_folder(source), []
  for name, leaf in importing.leaves(folder):
    path = tuple(int(part) if part.isdigit() else part for part in name.split("/"))
    if name.endswith("engram/table"):
      leaf = HostTable(leaf.codes[0], leaf.scales[0])
    elif isinstance(leaf, Quantised):
      leaf = Quantised(jnp.asarray(leaf.codes), jnp.asarray(leaf.scales), leaf.format)
    else:
      leaf = jnp.asarray(leaf)
    flat.append((path, nnx.Param(leaf)))
  export(folder.config, nnx.from_flat_state(flat), tmp_path / "out", base=source)
  assert_same_files(tmp_path / "out", source)


# --- Refusals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
  model = random_models.config(schedule="swa full/1")
  return model, random_models.arrays(model)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"schedule": "swa dense/2 reuse"}, r"layer 1: 'dense/2' has no published field"),
    ({"schedule": "swa mha"}, r"layer 1: 'mha' has no published field"),
    ({"residual": "plain", "streams": 1}, r"model\.residual: is 'plain'"),
    ({"expert_dim": 40}, r"model\.expert_dim: is 40; the released layout needs a multiple of 32"),
  ],
)
def test_what_has_no_published_form_is_refused_by_name(fields, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    export(random_models.config(**fields), {}, tmp_path / "out")
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda a: a.pop("norm/weight"), r"the model lacks arrays: norm/weight$"),
    (lambda a: a.update(extra=a["norm/weight"]), r"without a place in a release: extra$"),
    (lambda a: a.update({"norm/weight": np.ones(3, np.float32)}),
     r"norm/weight is float32 \[3\], must be bfloat16 or float32 \[64\]$"),
    (lambda a: a.update({"norm/weight": np.ones(64, np.float16)}), r"norm/weight is float16"),
    (lambda a: a.update({"norm/weight": np.full(64, np.nan, np.float32)}),
     r"norm\.weight: the values of norm/weight are not all finite$"),
    (lambda a: a.update({"norm/weight": np.full(64, 3.4e38, np.float32)}),
     r"norm\.weight: the values of norm/weight exceed what bfloat16 can hold$"),
  ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_named(plain, change, message, tmp_path):
  model, arrays = plain[0], dict(plain[1])
  change(arrays)
  with pytest.raises(FolderError, match=message) as caught:
    export(model, arrays, tmp_path / "out")
  assert "\n" not in str(caught.value)
  assert not any(tmp_path.iterdir())


def test_an_infinity_is_found_wherever_it_is(plain, tmp_path):
  model, arrays = plain[0], dict(plain[1])
  arrays["runs/1/ffn/experts/w3"] = arrays["runs/1/ffn/experts/w3"].copy()
  arrays["runs/1/ffn/experts/w3"][0, 2, 63, 31] = -np.inf
  where = r"layers\.1\.ffn\.experts\.2\.w3\.weight: the values of runs/1/ffn/experts/w3\[0, 2\]"
  with pytest.raises(FolderError, match=where + " are not all finite"):
    export(model, arrays, tmp_path / "out")
  assert not any(tmp_path.iterdir())


def test_targets_that_are_refused(plain, tmp_path):
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "mine").write_text("")
  (tmp_path / "file").write_text("")
  (tmp_path / "stopped.partial").mkdir()
  for name, message in (
    ("full", "full: is not empty; a conversion writes to a new folder"),
    ("file", "file: is a file"),
    ("stopped", r"stopped\.partial: exists: a conversion is at work, or one was killed"),
    ("file/below", "below: cannot be written: Not a directory"),
  ):
    with pytest.raises(FolderError, match=message):
      export(*plain, tmp_path / name)
  (tmp_path / "empty").mkdir()
  export(*plain, tmp_path / "empty")
  assert_same_model(tmp_path / "empty", plain[0])


def test_a_full_disk_is_one_line_and_leaves_nothing(plain, tmp_path, monkeypatch):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # files end there, as on a full disk
  try:
    with pytest.raises(FolderError, match=r"out: cannot be written: File too large$"):
      export(*plain, tmp_path / "out")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
  with pytest.raises(FolderError, match=r"out: takes 0\.\d MB; 0\.0 MB are free"):
    export(*plain, tmp_path / "out")
  assert not any(tmp_path.iterdir())


def test_a_tensor_that_is_not_written_is_noticed(tmp_path):
  entries = {"a": Entry("F32", (2,)), "b": Entry("F32", (2,))}
  with (
    pytest.raises(RuntimeError, match="not written as announced: b"),
    ShardWriter(tmp_path, entries, dict.fromkeys(entries, "model.safetensors")) as writer,
  ):
    writer.write("a", [np.zeros(2, np.float32)])


def test_a_folder_without_an_index_is_one_file(plain, tmp_path):
  export(*plain, tmp_path / "out")
  single = tmp_path / "single"
  shutil.copytree(tmp_path / "out", single)
  (single / folders.INDEX).unlink()
  (single / "model-00001-of-00001.safetensors").rename(single / "model.safetensors")
  names = sorted(path.name for path in single.iterdir())
  export(plain[0], imported(single), tmp_path / "again", base=single)
  kept = Origin.kept(single, {})
  export(plain[0], imported(single), tmp_path / "kept", kept=kept)
  for name in ("again", "kept"):
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == names
    assert folders.read_folder(tmp_path / name) == folders.read_folder(single)
