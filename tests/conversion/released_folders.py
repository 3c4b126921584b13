"""Small released folders for tests, read and changed without the project's own reader."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

import ml_dtypes
import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
RELEASED_CONFIG = GOLDEN / "hf_configs" / "deepseek-v4.1-flash.json"
CASES = ("tiny-text", "tiny-vision")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, data


def copy(case: str, to: pathlib.Path) -> pathlib.Path:
  """The model part of a golden case in a folder of its own."""
  to.mkdir(parents=True, exist_ok=True)
  for name in ("config.json", "engram_token_map.npy", INDEX, *SHARDS):
    shutil.copy(GOLDEN / case / name, to / name)
  return to


def read_shard(path: pathlib.Path) -> Tensors:
  content = path.read_bytes()
  start = 8 + int.from_bytes(content[:8], "little")
  header = json.loads(content[8:start])
  header.pop("__metadata__", None)
  return {
    name: (entry["dtype"], entry["shape"], content[start + first : start + last])
    for name, entry in header.items()
    for first, last in [entry["data_offsets"]]
  }


def write_shard(path: pathlib.Path, tensors: Tensors) -> None:
  header, end = {}, 0
  for name, (dtype, shape, data) in tensors.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
    end += len(data)
  text = json.dumps(header).encode()
  body = b"".join(data for _, _, data in tensors.values())
  path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def read_folder(folder: pathlib.Path) -> Tensors:
  return {k: v for path in folder.glob("*.safetensors") for k, v in read_shard(path).items()}


def change_shard(folder: pathlib.Path, name: str, change: Callable[[Tensors], None]) -> None:
  """Rewrites the shard that holds a tensor."""
  path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
  tensors = read_shard(path)
  change(tensors)
  write_shard(path, tensors)


def change_json(path: pathlib.Path, change: Callable[[dict], None]) -> None:
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))


def values(tensors: Tensors, name: str) -> np.ndarray:
  """A tensor as float64, on-disk orientation, from what the format's description says alone."""
  dtype, shape, data = tensors[name]
  if dtype == "F32":
    return np.frombuffer(data, np.float32).reshape(shape).astype(np.float64)
  if dtype == "BF16":
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(shape).astype(np.float64)
  raw = np.frombuffer(data, np.uint8).reshape(shape)
  _, scale_shape, scale_data = tensors[name.removesuffix("weight") + "scale"]
  scale = 2.0 ** (np.frombuffer(scale_data, np.uint8).reshape(scale_shape).astype(np.float64) - 127)
  if dtype == "I8":  # two codes a byte, the low nibble is the even column
    plain = E2M1[np.stack([raw & 15, raw >> 4], -1).reshape(shape[0], -1)]
  else:
    plain = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  rows_of_scale = 1 if scale_shape[0] == shape[0] else 32
  wide = np.repeat(np.repeat(scale, rows_of_scale, 0), 32, 1)
  return plain * wide[: plain.shape[0], : plain.shape[1]]
