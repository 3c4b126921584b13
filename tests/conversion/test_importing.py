"""Imported leaves: values against an independent reader, memory, what is no number."""

import functools
import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import released_folders as folders
from hysparse_kernels.formats import Quantised
from released_folders import INDEX

from hysparse import published
from hysparse.conversion import importing
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.folder import open_folder
from hysparse.conversion.load import load
from hysparse.conversion.shards import FolderError

# Beyond the leaf and the largest tensor: names, and a block of rows with what its check makes.
SLACK_BYTES = 500_000


@functools.cache
def stored(case: str) -> folders.Tensors:
  return folders.read_folder(folders.GOLDEN / case)


def expected(case: str, leaf: tensors_lib.Leaf, name: str) -> np.ndarray:
  """One tensor's values as the modules of nn/ keep them."""
  plain = folders.values(stored(case), name)
  if leaf.path.endswith("wo_a/weight"):  # [groups * outputs, inputs] -> [groups, inputs, outputs]
    return plain.reshape(leaf.groups, -1, plain.shape[1]).transpose(0, 2, 1)
  kept = ("/gate/weight", "table", "embed/weight", "head/weight", "q_weight", "k_weight", "fn",
          "markov/embed", "markov/head")  # fmt: skip
  return plain if plain.ndim == 1 or leaf.path.endswith(kept) else plain.T


@pytest.mark.parametrize("case", folders.CASES)
def test_kept_leaves_hold_the_bytes_of_the_folder(case):
  folder = open_folder(folders.GOLDEN / case)
  table = {leaf.path: leaf for leaf in tensors_lib.leaves(folder.config)}
  found = dict(importing.leaves(folder))
  assert found.keys() == table.keys() | {"token_map"}
  seen = set()
  for path, leaf in table.items():
    for i, name in enumerate(leaf.names):
      index = np.unravel_index(i, leaf.stack) if leaf.stack else ()
      value, (dtype, _, data) = found[path], stored(case)[name]
      seen.add(name)
      if not leaf.is_quantised:
        assert value.dtype == (np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
          value[index].astype(np.float64), expected(case, leaf, name), err_msg=name
        )
        continue
      scale = name.removesuffix("weight") + "scale"
      seen.add(scale)
      assert isinstance(value, Quantised) and value.format == leaf.encoding
      assert value.codes[index].tobytes() == data, name
      assert value.scales[index].tobytes() == stored(case)[scale][2], name
      assert value.shape == (*leaf.stack, *leaf.shape)
  assert seen == stored(case).keys()


@pytest.mark.parametrize(("dequantise", "dtype"), [("f32", np.float32), ("bf16", "bfloat16")])
def test_dequantised_leaves_hold_the_exact_values(dequantise, dtype):
  case = "tiny-text"
  folder = open_folder(folders.GOLDEN / case)
  for leaf in tensors_lib.leaves(folder.config):
    value = importing.read_leaf(folder, leaf, dequantise)
    assert value.shape == leaf.model_shape
    on_disk = np.float32 if stored(case)[leaf.names[0]][0] == "F32" else np.dtype("bfloat16")
    assert value.dtype == (dtype if leaf.is_quantised or dequantise == "f32" else on_disk)
    for i, name in enumerate(leaf.names):
      index = np.unravel_index(i, leaf.stack) if leaf.stack else ()
      np.testing.assert_array_equal(
        value[index].astype(np.float64), expected(case, leaf, name), err_msg=name
      )


def test_blocks_of_rows_give_what_the_whole_gives(monkeypatch):
  """Block ends within a tensor and within a group of outputs, tiles cut by neither."""
  folder = open_folder(folders.GOLDEN / "tiny-text")
  paths = ("runs/1/attn/output/wo_a/weight", "runs/0/ffn/experts/w2", "runs/0/engram/table",
           "runs/2/attn/wq_a/weight", "runs/1/attn/compressor/wkv/weight")  # fmt: skip
  table = [leaf for leaf in tensors_lib.leaves(folder.config) if leaf.path in paths]
  whole = [importing.read_leaf(folder, leaf, "f32") for leaf in table]
  monkeypatch.setattr("hysparse.conversion.shards._BLOCK_BYTES", 3000)
  for leaf, value in zip(table, whole, strict=True):
    np.testing.assert_array_equal(importing.read_leaf(folder, leaf, "f32"), value)
    if leaf.is_quantised:
      kept = importing.read_leaf(folder, leaf)
      np.testing.assert_array_equal(importing.dequantised(leaf, kept, "f32", folder.path), value)
  assert len(table) == len(paths)


def test_float32_engram_norm_weights_stay_float32(tmp_path):
  folder = folders.copy("tiny-text", tmp_path)
  name = "layers.0.engram.q_weight"
  values = np.linspace(0.1, 1, 4 * 256, dtype=np.float32).reshape(4, 256)
  folders.change_shard(
    folder, name, lambda tensors: tensors.update({name: ("F32", [4, 256], values.tobytes())})
  )
  opened = open_folder(folder)
  leaf = next(x for x in tensors_lib.leaves(opened.config) if x.names == (name,))
  found = importing.read_leaf(opened, leaf)
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, values[None])


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory):
  """A model whose stacks of experts are many times its largest tensor; all codes are zero."""
  path = folders.copy("tiny-text", tmp_path_factory.mktemp("many"))
  for name in (INDEX, *folders.SHARDS):
    (path / name).unlink()
  folders.change_json(
    path / "config.json", lambda values: values["text_config"].update(n_routed_experts=128)
  )
  header, end = {}, 0
  for tensor in tensors_lib.tensors(published.read(str(path / "config.json"))):
    place = [end, end + tensor.nbytes]
    header[tensor.name] = {
      "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place
    }  # fmt: skip
    end = place[1]
  text = json.dumps(header).encode()
  with (path / "model.safetensors").open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
  return open_folder(path)


@pytest.mark.parametrize("dequantise", [None, "f32"])
def test_memory_beyond_the_leaf_is_at_most_the_largest_tensor(many_experts, dequantise):
  table = list(tensors_lib.leaves(many_experts.config))
  largest = max(tensor.nbytes for leaf in table for tensor in leaf.tensors())
  stack = next(leaf for leaf in table if leaf.path == "runs/0/ffn/experts/w1")
  importing.read_leaf(many_experts, stack, dequantise)  # compile what it compiles
  tracemalloc.start()
  try:
    for leaf in (stack, table[0]):
      before, _ = tracemalloc.get_traced_memory()
      tracemalloc.reset_peak()
      value = importing.read_leaf(many_experts, leaf, dequantise)
      beyond = tracemalloc.get_traced_memory()[1] - before - sum(x.nbytes for x in arrays(value))
      assert beyond <= largest + SLACK_BYTES
  finally:
    tracemalloc.stop()
  assert sum(tensor.nbytes for tensor in stack.tensors()) > 8 * largest  # a copy would show


def arrays(leaf) -> list[np.ndarray]:
  return [leaf.codes, leaf.scales] if isinstance(leaf, Quantised) else [leaf]


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("layers.1.attn.wq_b.weight", b"\x7f"),
    ("layers.1.attn.wq_b.weight", b"\xff"),
    ("layers.1.attn.wq_b.scale", b"\xff"),
    ("layers.3.ffn.experts.2.w1.scale", b"\xff"),
    ("layers.1.engram.embed.weight", b"\x7f"),
    ("embed.weight", b"\x80\x7f"),
    ("layers.2.attn.attn_sink", b"\x00\x00\xc0\x7f"),
  ],
)
@pytest.mark.parametrize("dequantise", [None, "bf16"])
def test_what_is_no_number_is_refused_by_name(tmp_path, name, value, dequantise):
  folder = folders.copy("tiny-text", tmp_path)

  def change(tensors):
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, data[: -len(value)] + value)

  folders.change_shard(folder, name, change)
  opened = open_folder(folder)
  with pytest.raises(FolderError) as caught:
    list(importing.leaves(opened, dequantise))
  assert f"of {name} are not all finite" in str(caught.value) and "\n" not in str(caught.value)


def test_every_code_of_an_expert_is_a_number(tmp_path):
  """E2M1 has no NaN: no byte is refused."""
  folder = folders.copy("tiny-text", tmp_path)
  name = "layers.3.ffn.experts.2.w1.weight"

  def change(tensors):
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, bytes(range(256)) + data[256:])

  folders.change_shard(folder, name, change)
  assert len(list(importing.leaves(open_folder(folder)))) > 100


def test_a_shard_that_shrinks_after_the_check(tmp_path):
  folder = folders.copy("tiny-text", tmp_path)
  opened = open_folder(folder)
  name = json.loads((folder / INDEX).read_text())["weight_map"]["norm.weight"]
  with (folder / name).open("r+b") as file:
    file.truncate(100_000)
  with pytest.raises(FolderError, match="cannot be read: the file ended early"):
    list(importing.leaves(opened))


def test_arrays_start_where_jax_can_take_them():
  for shape in ((3,), (300, 1000), (7, 5, 11)):
    found = importing.empty(shape, np.dtype(ml_dtypes.bfloat16))
    assert found.shape == shape and found.flags.c_contiguous
    if jax.default_backend() == "cpu":
      found[...] = 1
      assert jax.device_put(found).unsafe_buffer_pointer() == found.ctypes.data


def test_a_mapped_tensor_is_the_tensor():
  for stored in open_folder(folders.GOLDEN / "tiny-text").shards.tensors.values():
    mapped = stored.map()
    assert not mapped.flags.writeable
    np.testing.assert_array_equal(mapped, stored.read())


@pytest.mark.parametrize("dequantise", ["bf16", "f32"])
def test_a_product_that_overflows_is_refused_by_name(tmp_path, dequantise):
  folder = folders.copy("tiny-text", tmp_path)
  name = "layers.0.attn.wq_a.scale"

  def change(tensors):
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, bytes([254]) + data[1:])  # 2^127, itself a legal scale

  folders.change_shard(folder, name, change)
  (shard,) = (file for file in folders.SHARDS if name in folders.read_shard(folder / file))
  place = r"rows \d+\.\.\d+ of layers\.0\.attn\.wq_a\.weight are not all finite in"
  with pytest.raises(FolderError, match=rf"{shard}: {place}") as caught:
    load(folder, dequantise=dequantise)
  assert "\n" not in str(caught.value)
  list(importing.leaves(open_folder(folder)))  # kept as they are, code and scale are both legal
