"""A reader of released folders for tests, with nothing but NumPy and the description of the layout.

It lists what a folder must hold from its config.json, decodes codes and scales by tables of its own
and encodes values again, so that a fault of the project's tables and codecs cannot hide in both.
"""

import json
import math
import pathlib

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def _e4m3_values() -> np.ndarray:
  codes = np.arange(128)
  exponent, mantissa = codes >> 3, codes & 7
  values = np.where(
    exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
  )
  values[127] = np.nan
  return np.concatenate([values, -values])


E4M3 = _e4m3_values()
LARGEST = {"F8_E4M3": 448.0, "I8": 6.0}
FLOOR = {"F8_E4M3": 1e-4, "I8": 6 * 2.0**-126}  # of the largest magnitude that shares a scale


# --- What a folder holds -----------------------------------------------------------------------


def expected(config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
  """{tensor: (dtype, shape)} of a parsed config.json."""
  t, vision = config["text_config"], config.get("vision_config")
  layers, drafts = t["num_hidden_layers"], t["num_nextn_predict_layers"]
  d, vocab, hc = t["hidden_size"], t["vocab_size"], t["hc_mult"]
  found: dict[str, tuple[str, tuple[int, ...]]] = {}

  def plain(name, *shape, dtype="BF16"):
    found[name] = (dtype, shape)

  def tiled(name, rows, columns):
    found[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
    found[f"{name}.scale"] = ("F8_E8M0", (-(-rows // 32), -(-columns // 32)))

  def expert(name, rows, columns):
    found[f"{name}.weight"] = ("I8", (rows, columns // 2))
    found[f"{name}.scale"] = ("F8_E8M0", (rows, columns // 32))

  plain("embed.weight", vocab, d)
  plain("head.weight", vocab, d)
  plain("norm.weight", d)
  heads, hd, ql = t["num_attention_heads"], t["head_dim"], t["q_lora_rank"]
  groups, rank, inner = t["o_groups"], t["o_lora_rank"], t["moe_intermediate_size"]
  for i in range(layers + drafts):
    p = f"layers.{i}." if i < layers else f"mtp.{i - layers}."
    count = t["n_routed_experts"] if i < layers else t["dspark_n_routed_experts"]
    plain(f"{p}attn_norm.weight", d)
    plain(f"{p}ffn_norm.weight", d)
    for side in ("attn", "ffn"):
      plain(f"{p}hc_{side}_fn", (2 + hc) * hc, hc * d, dtype="F32")
      plain(f"{p}hc_{side}_base", (2 + hc) * hc, dtype="F32")
      plain(f"{p}hc_{side}_scale", 3, dtype="F32")
    plain(f"{p}attn.attn_sink", heads, dtype="F32")
    tiled(f"{p}attn.wq_a", ql, d)
    plain(f"{p}attn.q_norm.weight", ql)
    tiled(f"{p}attn.wq_b", heads * hd, ql)
    tiled(f"{p}attn.wkv", hd, d)
    plain(f"{p}attn.kv_norm.weight", hd)
    tiled(f"{p}attn.wo_a", groups * rank, heads * hd // groups)
    tiled(f"{p}attn.wo_b", d, groups * rank)
    plain(f"{p}ffn.gate.weight", count, d)
    plain(f"{p}ffn.gate.bias", count, dtype="F32")
    if vision:
      plain(f"{p}ffn.gate.bias_vl", count, dtype="F32")
    for e in range(count):
      expert(f"{p}ffn.experts.{e}.w1", inner, d)
      expert(f"{p}ffn.experts.{e}.w3", inner, d)
      expert(f"{p}ffn.experts.{e}.w2", d, inner)
    if t["n_shared_experts"]:
      tiled(f"{p}ffn.shared_experts.w1", inner, d)
      tiled(f"{p}ffn.shared_experts.w3", inner, d)
      tiled(f"{p}ffn.shared_experts.w2", d, inner)
  for i in t["kv_source_layer_ids"]:
    p = f"layers.{i}.attn."
    plain(f"{p}compressor.wkv.weight", hd, d)
    if t["compress_ratios"][i] > 1:
      plain(f"{p}compressor.wgate.weight", hd, d)
    plain(f"{p}compressor.norm.weight", hd)
    plain(f"{p}indexer.wk.weight", t["index_head_dim"], hd)
    plain(f"{p}indexer.k_norm.weight", t["index_head_dim"])
  for i in t["index_source_layer_ids"]:
    tiled(f"layers.{i}.attn.indexer.wq_b", t["index_n_heads"] * t["index_head_dim"], ql)
    plain(f"layers.{i}.attn.indexer.weights_proj.weight", t["index_n_heads"], d)
  for k, i in enumerate(t["engram_layer_ids"]):
    p, rows, width = f"layers.{i}.engram.", t["engram_num_embeddings"][k], t["engram_head_dim"]
    found[f"{p}embed.weight"] = ("F8_E4M3", (rows, width))
    found[f"{p}embed.scale"] = ("F8_E8M0", (rows, width // 32))
    columns = (t["engram_max_ngram_size"] - 1) * t["engram_n_heads"] * width
    tiled(f"{p}wkv", (hc + 1) * d, columns)
    plain(f"{p}q_weight", hc, d)
    plain(f"{p}k_weight", hc, d)
  if drafts:
    last, r = f"mtp.{drafts - 1}.", t["dspark_markov_rank"]
    tiled("mtp.0.main_proj", d, len(t["dspark_target_layer_ids"]) * d)
    plain("mtp.0.main_norm.weight", d)
    plain(f"{last}norm.weight", d)
    plain(f"{last}markov_head.embed.weight", vocab, r)
    plain(f"{last}markov_head.head.weight", vocab, r)
    plain(f"{last}confidence_head.proj.weight", 1, d + r)
  if vision:
    vd, vi, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    plain("vision.patch_embed.proj.weight", vd, 3 * patch * patch)
    plain("vision.patch_embed.proj.bias", vd)
    for b in range(vision["num_hidden_layers"]):
      p = f"vision.blocks.{b}."
      plain(f"{p}norm1.weight", vd)
      plain(f"{p}norm2.weight", vd)
      plain(f"{p}attn.wqkv.weight", 3 * vd, vd)
      plain(f"{p}attn.wqkv.bias", 3 * vd)
      plain(f"{p}attn.wo.weight", vd, vd)
      plain(f"{p}attn.wo.bias", vd)
      plain(f"{p}mlp.w1.weight", 2 * vi, vd)
      plain(f"{p}mlp.w2.weight", vd, vi)
    plain("vision.norm.weight", vd)
    cell = vd * vision["downsample_ratio"] ** 2
    for name, columns in (("w1", cell), ("w2", d)):
      plain(f"aligner.{name}.weight", d, columns)
      plain(f"aligner.{name}.bias", d)
    for name in ("start", "end", "newline"):
      plain(f"image_{name}", d)
  return found


# --- Files -------------------------------------------------------------------------------------


class Folder:
  """A folder as it is on disk.

  Attributes:
    config: the parsed config.json.
    weight_map: the file of each tensor.
    entries: {tensor: (dtype, shape)} by the headers.
  """

  def __init__(self, path: pathlib.Path):
    self.config = json.loads((path / "config.json").read_text())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    self.weight_map: dict[str, str] = index["weight_map"]
    self.entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    self._data: dict[str, np.ndarray] = {}
    for file in sorted(set(self.weight_map.values())):
      raw = np.memmap(path / file, np.uint8, "r")
      length = int(raw[:8].view("<u8")[0])
      header = json.loads(raw[8 : 8 + length].tobytes())
      header.pop("__metadata__", None)
      end = 0
      for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert self.weight_map[name] == file and start == end
        end = stop
        self.entries[name] = (entry["dtype"], tuple(entry["shape"]))
        self._data[name] = raw[8 + length + start : 8 + length + stop]
      assert len(raw) == 8 + length + end
    assert self.entries.keys() == self.weight_map.keys()
    assert index["metadata"]["total_size"] == sum(map(len, self._data.values()))

  def codes(self, name: str) -> np.ndarray:
    """The bytes of a tensor in its shape; packed experts one code a byte."""
    dtype, shape = self.entries[name]
    if dtype != "I8":
      return self._data[name].reshape(shape)
    packed = self._data[name].reshape(shape)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape[0], -1)

  def scales(self, name: str) -> np.ndarray:
    """float64, one for each element of a quantised `X.weight`."""
    dtype, _ = self.entries[name]
    rows, columns = self.codes(name).shape
    raw = self.codes(name.removesuffix("weight") + "scale")
    scales = np.where(raw == 255, np.nan, 2.0 ** (raw.astype(np.float64) - 127))
    rowwise = dtype == "I8" or ".engram.embed." in name
    if not rowwise:
      scales = np.repeat(scales, 32, axis=0)[:rows]
    return np.repeat(scales, 32, axis=1)[:, :columns]

  def values(self, name: str) -> np.ndarray:
    """float64 values of a tensor that is no scale."""
    dtype, shape = self.entries[name]
    if dtype == "F32":
      return self._data[name].view("<f4").reshape(shape).astype(np.float64)
    if dtype == "BF16":
      bits = self._data[name].view("<u2").astype(np.uint32) << 16
      return bits.view(np.float32).reshape(shape).astype(np.float64)
    table = E2M1 if dtype == "I8" else E4M3
    return table[self.codes(name)] * self.scales(name)


# --- Encoding ----------------------------------------------------------------------------------


def best_scales(values: np.ndarray, dtype: str, rowwise: bool) -> np.ndarray:
  """The smallest powers of two that bring what shares them into the range of the codes."""
  rows, columns = values.shape
  height = 1 if rowwise else 32
  padded = np.zeros((-(-rows // height) * height, -(-columns // 32) * 32))
  padded[:rows, :columns] = np.abs(values)
  amax = padded.reshape(-1, height, padded.shape[1] // 32, 32).max(axis=(1, 3))
  quotient = np.maximum(amax, FLOOR[dtype]) / LARGEST[dtype]
  scales = 2.0 ** np.ceil(np.log2(quotient))
  return np.repeat(np.repeat(scales, height, 0), 32, 1)[:rows, :columns]


def encode(ratios: np.ndarray, dtype: str) -> np.ndarray:
  """Codes of the nearest values, ties to the even code."""
  table = E2M1[:8] if dtype == "I8" else E4M3[:127]
  magnitude = np.minimum(np.abs(ratios), table[-1])
  upper = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
  below, above = magnitude - table[upper - 1], table[upper] - magnitude
  up = (above < below) | ((above == below) & (upper % 2 == 0))
  codes = np.where(up, upper, upper - 1)
  return (
    codes + np.where(np.signbit(ratios), len(E2M1 if dtype == "I8" else E4M3) // 2, 0)
  ).astype(np.uint8)


def half_step(values: np.ndarray, scales: np.ndarray, dtype: str) -> np.ndarray:
  """The largest error of rounding: half the distance of codes where |value / scale| lies."""
  smallest, bits = {"I8": (0, 1), "F8_E4M3": (-6, 3)}[dtype]
  with np.errstate(divide="ignore"):
    exponent = np.floor(np.log2(np.abs(values) / scales))
  return 0.5 * scales * 2.0 ** (np.maximum(exponent, smallest) - bits)


def total_bytes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
  widths = {"F32": 4, "BF16": 2}
  return sum(math.prod(shape) * widths.get(dtype, 1) for dtype, shape in tensors.values())
