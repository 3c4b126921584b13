"""A damaged folder is refused before its data is read, with all that is wrong in one message."""

import json
import re
import shutil

import numpy as np
import pytest
import released_folders as folders
from released_folders import INDEX, SHARDS

from hysparse import published, tokenizer
from hysparse.conversion import folder as folder_lib
from hysparse.conversion.folder import FolderError, open_folder
from hysparse.conversion.shards import read_header, released_name


@pytest.fixture
def folder(tmp_path):
  return folders.copy("tiny-text", tmp_path / "model")


def problems(folder) -> list[str]:
  with pytest.raises(FolderError) as caught:
    open_folder(folder)
  found = list(caught.value.problems)
  lines = str(caught.value).split("\n  ")
  assert lines[1:] == found or str(caught.value) == f"{folder}: {found[0]}"
  assert not any("\n" in problem for problem in found)
  return found


def test_whole_folders_have_no_problems():
  for case in folders.CASES:
    found = open_folder(folders.GOLDEN / case)
    assert found.config == published.read(str(folders.GOLDEN / case / "config.json"))
    assert found.token_map.tolist() == np.load(found.path / "engram_token_map.npy").tolist()


# --- Files ---------------------------------------------------------------------------------------


def test_no_folder(tmp_path):
  assert problems(tmp_path / "none") == ["does not exist"]
  (tmp_path / "file").write_text("")
  assert problems(tmp_path / "file") == ["is no folder"]


def test_an_empty_folder(tmp_path):
  (tmp_path / "model").mkdir()
  assert problems(tmp_path / "model") == [
    "config.json: is missing",
    f"has neither {INDEX} nor model.safetensors",
  ]


def test_a_missing_shard_is_one_line(folder):
  (folder / SHARDS[1]).unlink()
  (line,) = problems(folder)
  assert re.fullmatch(rf"{SHARDS[1]}: is missing \(\d+ tensors of the index\)", line)


@pytest.mark.parametrize("left", [0, 7, 8, 1000])
def test_a_shard_cut_within_its_header(folder, left):
  (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:left])
  (line,) = problems(folder)
  assert line.startswith(f"{SHARDS[0]}: is cut short: {left:,} bytes do not hold its header")


def test_a_shard_cut_within_its_data(folder):
  content = (folder / SHARDS[0]).read_bytes()
  (folder / SHARDS[0]).write_bytes(content[:-1])
  assert problems(folder) == [
    f"{SHARDS[0]}: is cut short: {len(content) - 1:,} bytes of {len(content):,}"
  ]


def test_a_shard_with_something_behind_its_data(folder):
  with (folder / SHARDS[0]).open("ab") as file:
    file.write(b"x")
  (line,) = problems(folder)
  assert "is too long" in line


def entry(**change):
  """Changes the header entry of the final norm without touching the data."""

  def damaged(content: bytes) -> bytes:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["embed.weight"] |= change
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[start:]

  return damaged


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda b: b[:8] + b"x" + b[9:], "broken header: Expecting value"),
    (lambda b: b[:8] + b"\xff" + b[9:], "broken header: not UTF-8"),
    (lambda b: (2).to_bytes(8, "little") + b"[]" + b[8:], "broken header: no object at its top"),
    (lambda b: (1 << 60).to_bytes(8, "little") + b[8:], "is cut short"),
    (lambda b: b.replace(b'"embed.weight"', b'"norm.weight" ', 1), "norm.weight stands twice"),
    (entry(dtype="F9"), "embed.weight has the unknown dtype 'F9'"),
    (entry(dtype=[1]), r"embed.weight has the unknown dtype \[1\]"),
    (entry(shape=[512, "256"]), "embed.weight has .* where whole numbers belong"),
    (entry(shape=[512, -256]), "embed.weight has .* where whole numbers belong"),
    (entry(shape=[512, 255]), r"embed.weight takes 262,144 bytes, which is not BF16 \[512, 255\]"),
    (entry(data_offsets=[4, 2]), r"embed.weight has the offsets \[4, 2\]"),
    (entry(data_offsets=[1, 262_145]), "overlaps what lies before it"),
    (lambda b: entry(shape=[511, 256], data_offsets=[0, 511 * 512])(b), "leaves a gap"),
  ],
)
def test_broken_headers(tmp_path, damage, message):
  path = tmp_path / "one.safetensors"
  tensors = folders.read_folder(folders.GOLDEN / "tiny-text")
  folders.write_shard(path, {name: tensors[name] for name in ("embed.weight", "norm.weight")})
  assert read_header(path)[1] == []
  path.write_bytes(damage(path.read_bytes()))
  try:
    _, found = read_header(path)
  except ValueError as error:
    found = [str(error)]
  assert any(re.search(message, problem) for problem in found), found


def test_the_index_and_the_shards_must_agree(folder):
  def change(index):
    files = index["weight_map"]
    files["embed.weight"] = SHARDS[1 - SHARDS.index(files["embed.weight"])]
    del files["norm.weight"]
    files["nowhere.weight"] = SHARDS[0]

  folders.change_json(folder / INDEX, change)
  found = problems(folder)
  told = " ".join(found)
  assert re.search(r"places here what it lacks: .*nowhere.weight", told)
  assert re.search(r"places here what it lacks: .*embed.weight", told)
  assert re.search(r"holds what the index does not place here: .*embed.weight", told)
  assert re.search(r"holds what the index does not place here: .*norm.weight", told)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}',
                                  '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}',
                                  '{"weight_map": {"a": "x", "a": "y"}}'])  # fmt: skip
def test_a_broken_index(folder, text):
  (folder / INDEX).write_text(text)
  (line,) = problems(folder)
  assert line.startswith(f"{INDEX}: cannot be read")


def test_one_file_needs_no_index(folder):
  folders.write_shard(folder / "model.safetensors", folders.read_folder(folder))
  for name in (INDEX, *SHARDS):
    (folder / name).unlink()
  assert len(open_folder(folder).shards.tensors) == 411


# --- Tensors -------------------------------------------------------------------------------------


def rename(old, new):
  def change(tensors):
    tensors[new] = tensors.pop(old)

  return change


def test_a_missing_an_unknown_and_a_renamed_tensor(folder):
  old, new = "layers.1.attn.wq_a.weight", "layers.1.attn.wq_x.weight"
  folders.change_shard(folder, old, rename(old, new))
  folders.change_json(
    folder / INDEX, lambda i: i["weight_map"].update({new: i["weight_map"].pop(old)})
  )
  assert problems(folder) == [f"missing: {old}", f"not of this model: {new}"]


def test_a_weight_without_its_scale(folder):
  name = "layers.1.attn.wq_a.scale"
  folders.change_shard(folder, name, lambda tensors: tensors.pop(name))
  folders.change_json(folder / INDEX, lambda index: index["weight_map"].pop(name))
  assert problems(folder) == ["without their scales: layers.1.attn.wq_a.weight"]


def test_a_weight_and_its_scale_may_lie_apart(folder):
  name = "layers.0.attn.wq_a.scale"
  path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
  other = folder / SHARDS[1 - SHARDS.index(path.name)]
  here, there = folders.read_shard(path), folders.read_shard(other)
  there[name] = here.pop(name)
  folders.write_shard(path, here)
  folders.write_shard(other, there)
  folders.change_json(folder / INDEX, lambda index: index["weight_map"].update({name: other.name}))
  assert open_folder(folder).shards.tensors[name].file == other


def recast(name, dtype, shape):
  def change(tensors):
    _, _, data = tensors[name]
    tensors[name] = (dtype, shape, data)

  return change


def test_wrong_shapes_and_dtypes(folder):
  folders.change_shard(folder, "embed.weight", recast("embed.weight", "BF16", [256, 512]))
  folders.change_shard(folder, "norm.weight", recast("norm.weight", "F16", [256]))
  (line,) = problems(folder)
  assert "embed.weight is BF16 [256, 512], must be BF16 [512, 256]" in line
  assert "norm.weight is F16 [256], must be BF16 [256]" in line


def test_engram_norm_weights_may_be_float32_and_no_others(folder):
  def widen(name):
    def change(tensors):
      _, shape, data = tensors[name]
      wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()
      tensors[name] = ("F32", shape, wide)

    return change

  folders.change_shard(folder, "layers.0.engram.q_weight", widen("layers.0.engram.q_weight"))
  assert open_folder(folder).shards.tensors["layers.0.engram.q_weight"].dtype == "F32"
  folders.change_shard(folder, "norm.weight", widen("norm.weight"))
  assert problems(folder) == ["wrong shape or dtype: norm.weight is F32 [256], must be BF16 [256]"]


def test_copies_of_the_embedding_in_draft_layers_are_ignored(folder):
  def change(tensors):
    tensors["mtp.0.embed.weight"] = tensors["embed.weight"]
    tensors["mtp.0.head.weight"] = tensors["embed.weight"]

  folders.change_shard(folder, "embed.weight", change)

  def index(values):
    files = values["weight_map"]
    files["mtp.0.embed.weight"] = files["mtp.0.head.weight"] = files["embed.weight"]

  folders.change_json(folder / INDEX, index)
  open_folder(folder)


def test_hugging_face_spellings_are_read(tmp_path):
  """Every name of a folder in the other style gives the same folder."""

  def spelled(name: str) -> str:
    if name.startswith("vision."):
      return f"model.{name}"
    words = ["self_attn" if w == "attn" else "mlp" if w == "ffn" else w for w in name.split(".")]
    if words[-1] == "scale":
      words[-1] = "weight_scale_inv"
    if words[-2:] == ["gate", "bias"]:
      words[-1] = "e_score_correction_bias"
    return ".".join(["model", *words])

  folder = folders.copy("tiny-vision", tmp_path)
  for shard in SHARDS:
    tensors = folders.read_shard(folder / shard)
    folders.write_shard(folder / shard, {spelled(name): t for name, t in tensors.items()})
  folders.change_json(
    folder / INDEX,
    lambda i: i.update(weight_map={spelled(n): file for n, file in i["weight_map"].items()}),
  )
  found, plain = open_folder(folder), open_folder(folders.GOLDEN / "tiny-vision")
  assert found.shards.tensors.keys() == plain.shards.tensors.keys()
  assert any("self_attn" in name for name in found.shards.index)


def test_released_names_stay_themselves():
  for case in folders.CASES:
    for name in folders.read_folder(folders.GOLDEN / case):
      assert released_name(name) == name


def test_two_spellings_of_one_tensor(folder):
  def change(tensors):
    tensors["model.norm.weight"] = tensors["norm.weight"]

  folders.change_shard(folder, "norm.weight", change)
  folders.change_json(
    folder / INDEX,
    lambda i: i["weight_map"].update({"model.norm.weight": i["weight_map"]["norm.weight"]}),
  )
  (line,) = problems(folder)
  assert "model.norm.weight is a second norm.weight, beside norm.weight" in line


# --- Config and Engram's id map ------------------------------------------------------------------


def test_an_unknown_architecture(folder):
  folders.change_json(
    folder / "config.json", lambda values: values.update(architectures=["OtherForCausalLM"])
  )
  (line,) = problems(folder)
  assert line.startswith("config.json: architecture OtherForCausalLM")


def test_a_broken_config(folder):
  (folder / "config.json").write_text("{")
  (line,) = problems(folder)
  assert line.startswith("config.json: is not JSON")


def test_table_sizes_that_the_hash_does_not_give(folder):
  folders.change_json(
    folder / "config.json",
    lambda values: values["text_config"].update(engram_num_embeddings=[661, 864]),
  )
  (line,) = problems(folder)
  assert "engram_num_embeddings: is [661, 864]" in line


@pytest.mark.parametrize(
  ("found", "message"),
  [
    (np.zeros(511, np.int32), "maps 511 ids; vocab_size is 512"),
    (np.full(512, 256, np.int32), r"compressed ids 256..256; .* is 256"),
    (np.full(512, -1, np.int32), r"compressed ids -1..-1"),
    (np.zeros((2, 256), np.int32), "must be a vector of whole numbers"),
    (np.zeros(512, np.float32), "must be a vector of whole numbers"),
    (np.array([None] * 512), "cannot be read"),
  ],
)
def test_id_maps_that_do_not_fit(folder, found, message):
  np.save(folder / folder_lib.TOKEN_MAP, found, allow_pickle=True)
  (line,) = problems(folder)
  assert line.startswith("engram_token_map.npy") and re.search(message, line)


def test_the_id_map_comes_from_the_tokenizer_without_a_file(folder):
  (folder / folder_lib.TOKEN_MAP).unlink()
  assert problems(folder) == [
    "neither engram_token_map.npy nor tokenizer.json: Engram layers need one of them"
  ]
  bytes_ = tokenizer.ByteTokenizer()
  bytes_.save(folder)
  found = open_folder(folder).token_map
  expected = tokenizer.engram_token_map(bytes_)
  assert found[: len(expected)].tolist() == expected.tolist() and not found[len(expected) :].any()
  (folder / "tokenizer.json").write_text("{")
  (line,) = problems(folder)
  assert line.startswith("tokenizer.json: is no tokenizer.json")


# --- All at once ---------------------------------------------------------------------------------


def test_everything_wrong_is_told_at_once_and_shortened(folder):
  def change(tensors):
    for name in [name for name in tensors if ".experts." in name]:
      del tensors[name]
    tensors["extra"] = ("F32", [1], bytes(4))
    recast("embed.weight", "BF16", [256, 512])(tensors)

  folders.change_shard(folder, "embed.weight", change)
  (folder / SHARDS[1]).unlink()
  (folder / folder_lib.TOKEN_MAP).unlink()
  found = problems(folder)
  kinds = [
    f"{SHARDS[0]}: the index places here what it lacks: .* and [0-9]+ more",
    f"{SHARDS[0]}: holds what the index does not place here: extra",
    f"{SHARDS[1]}: is missing",
    "missing: .* and [0-9]+ more",
    "not of this model: extra",
    "wrong shape or dtype: embed.weight",
    "neither engram_token_map.npy nor tokenizer.json",
  ]
  assert len(found) == len(kinds)
  for kind, problem in zip(kinds, found, strict=True):
    assert re.match(kind, problem), problem
  assert max(map(len, found)) < 500


def test_checking_reads_no_data(folder, monkeypatch):
  """Zeros in place of all data, in a sparse file: headers are all that counts."""
  for shard in SHARDS:
    content = (folder / shard).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    with (folder / shard).open("wb") as file:
      file.write(content[:start])
      file.truncate(len(content))
  open_folder(folder)
  shutil.rmtree(folder)
