"""Random weights in the released names, dtypes and shards, with the statistics of the golden ones.

Activations, scores and logits keep a scale of about 1, as in a trained model, and biases, sinks and
stream mixes are large enough that leaving one out shows.
"""

from __future__ import annotations

import json
import pathlib
import re

import independent_reader as reader
import numpy as np
import released_folders

# First match wins: (pattern, mean, standard deviation), or a gain over 1 / sqrt(inputs).
_PLAIN = (
  (r"hc_.*_scale", 0.3, 0.5),
  (r"hc_.*_base", 0.0, 0.5),
  (r"attn_sink", 0.0, 1.0),
  (r"gate\.bias", 0.0, 0.3),
  (r"engram\.[qk]_weight", 0.0, 0.5),
  (r"(attn_norm|ffn_norm|kv_norm|k_norm|compressor\.norm)\.weight", 0.6, 0.1),
  (r"norm\d?\.weight", 1.0, 0.1),
  (r"\.bias$", 0.0, 0.3),
  (r"image_", 0.0, 0.5),
  (r"embed\.weight", 0.0, 0.5),
)
_GAIN = ((r"gate\.weight", 2.0), (r"wgate", 2.0), (r"wq_b", 1.5), (r".", 1.2))
_SHARD_SPLIT = 3  # every third tensor is in the second shard: scales part from their weights


def write(folder: pathlib.Path, config: dict, rng: np.random.Generator) -> None:
  """config.json, two shards and their index."""
  (folder / "config.json").write_text(json.dumps(config))
  shards = [{}, {}]
  for number, (name, (dtype, shape)) in enumerate(stored(config, rng).items()):
    shards[number % _SHARD_SPLIT == 0][name] = (dtype, *shape)
  weight_map = {}
  for file, tensors in zip(released_folders.SHARDS, shards, strict=True):
    released_folders.write_shard(folder / file, tensors)
    weight_map |= dict.fromkeys(tensors, file)
  total = sum(len(data) for tensors in shards for _, _, data in tensors.values())
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (folder / released_folders.INDEX).write_text(json.dumps(index))


def stored(config: dict, rng: np.random.Generator) -> dict[str, tuple[str, tuple[list, bytes]]]:
  """{tensor: (dtype, (shape, bytes))}."""
  listed, found = reader.expected(_resolved(config)), {}
  for name, (dtype, shape) in listed.items():
    if name.endswith(".scale"):
      continue
    values = _draw(name, shape if dtype != "I8" else (shape[0], 2 * shape[1]), rng)
    if dtype == "F32":
      found[name] = dtype, (list(shape), values.astype("<f4").tobytes())
    elif dtype == "BF16":
      bits = to_bfloat16(values).view("<u4") >> 16
      found[name] = dtype, (list(shape), bits.astype("<u2").tobytes())
    else:
      scale_name = name.removesuffix("weight") + "scale"
      scale_dtype, scale_shape = listed[scale_name]
      rowwise = dtype == "I8" or ".engram.embed." in name
      scales = reader.best_scales(values, dtype, rowwise)
      codes = reader.encode(values / scales, dtype)
      if dtype == "I8":
        codes = codes[:, ::2] | codes[:, 1::2] << 4
      exponents = (np.log2(scales[:: 1 if rowwise else 32, ::32]) + 127).astype(np.uint8)
      found[name] = dtype, (list(shape), codes.tobytes())
      found[scale_name] = scale_dtype, (list(scale_shape), exponents.tobytes())
  return found


def to_bfloat16(x: np.ndarray) -> np.ndarray:
  """The nearest bfloat16 values, as float32."""
  bits = np.asarray(x, np.float32).view(np.uint32)
  return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)


def _resolved(config: dict) -> dict:
  """With counts of 0 that mean "as the backbone" written out."""
  t = dict(config["text_config"])
  t["dspark_n_routed_experts"] = t["dspark_n_routed_experts"] or t["n_routed_experts"]
  return config | {"text_config": t}


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
  for pattern, mean, spread in _PLAIN:
    if re.search(pattern, name):
      return mean + spread * rng.standard_normal(shape)
  gain = next(gain for pattern, gain in _GAIN if re.search(pattern, name))
  return rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
