"""Every tensor of the released checkpoint layout, and where it lives in the state of a model.

`leaves(config)` is the table: one `Leaf` for each array of the model (all but the Engram id map,
which is no released tensor), with the names of the tensors it is stacked from. `tensors(config)`
lists the same tensors one by one. Reading, checking, counting and writing a folder all follow it.

A quantised tensor is two on disk: codes (`X.weight`) and scales (`X.scale`). Shapes here are those
on disk, [outputs, inputs] for matrices.

Source: deepseek-ai/DeepSeek-V4.1-Flash; arXiv 2609.19969.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from hysparse import parameters, published
from hysparse import schedule as schedule_lib
from hysparse.config import ConfigError, ModelConfig

TILE = 32  # inputs (and, in tiles, outputs) that share a scale

Encoding = Literal["bf16", "f32", "fp8_tile", "fp8_row", "mxfp4"]
Part = Literal["values", "codes", "scales"]

_PLAIN = {"bf16": "BF16", "f32": "F32"}
_CODES = {"fp8_tile": "F8_E4M3", "fp8_row": "F8_E4M3", "mxfp4": "I8"}
_SCALES = "F8_E8M0"

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "F8_E8M0": 1}


class Tensor(NamedTuple):
  """One tensor of a folder.

  Attributes:
    name: in the released spelling.
    shape: on disk.
    dtype: of safetensors; what is written.
    leaf: the array of the model it belongs to.
    index: its place on the leaf's leading axes.
    part: what of the leaf it holds; plain tensors have "values".
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  leaf: Leaf
  index: tuple[int, ...]
  part: Part

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * ITEM_BYTES[self.dtype]

  @property
  def dtypes(self) -> tuple[str, ...]:
    """What a reader accepts: some writers store Engram's norm weights in float32."""
    return (self.dtype, "F32") if self.leaf.or_f32 else (self.dtype,)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of the model's state (checkpoints.py names it) and the tensors that make it.

  Attributes:
    path: "runs/0/attn/wq_a/weight".
    stack: leading axes: (layers of the run,), (layers, experts), or () for what stands alone.
    names: of the values or codes, row-major over `stack`.
    shape: of one tensor, logical: [outputs, inputs], unpacked.
    encoding: how its values are stored; one of the three quantised ones has scales.
    layout: how an array of plain values is kept in the model: as on disk, transposed, or transposed
      within each group of outputs: [groups, inputs, outputs of a group]. Quantised leaves keep
      the layout on disk.
    groups: of the "grouped" layout.
    or_f32: a reader accepts float32 as well.
  """

  path: str
  stack: tuple[int, ...]
  names: tuple[str, ...]
  shape: tuple[int, ...]
  encoding: Encoding
  layout: Literal["kept", "transposed", "grouped"] = "kept"
  groups: int = 1
  or_f32: bool = False

  @property
  def is_quantised(self) -> bool:
    return self.encoding in _CODES

  @property
  def tile_rows(self) -> int:
    """Rows that share a scale."""
    return TILE if self.encoding == "fp8_tile" else 1

  @property
  def codes_shape(self) -> tuple[int, int]:
    """Of one tensor of codes; two E2M1 codes share a byte."""
    rows, columns = self.shape
    return (rows, columns // 2 if self.encoding == "mxfp4" else columns)

  @property
  def scales_shape(self) -> tuple[int, int]:
    rows, columns = self.shape
    return (-(-rows // self.tile_rows), -(-columns // TILE))

  @property
  def model_shape(self) -> tuple[int, ...]:
    """Of the whole array when it holds plain values."""
    if self.layout == "kept":
      return (*self.stack, *self.shape)
    rows, columns = self.shape
    if self.layout == "transposed":
      return (*self.stack, columns, rows)
    return (*self.stack, self.groups, columns, rows // self.groups)

  def tensors(self) -> Iterator[Tensor]:
    """Its tensors, row-major over `stack`; codes before their scales."""
    plain = _PLAIN.get(self.encoding)
    codes_shape, scales_shape = (self.codes_shape, self.scales_shape) if not plain else ((), ())
    for index, name in zip(itertools.product(*map(range, self.stack)), self.names, strict=True):
      if plain:
        yield Tensor(name, self.shape, plain, self, index, "values")
      else:
        yield Tensor(name, codes_shape, _CODES[self.encoding], self, index, "codes")
        yield Tensor(scale_name(name), scales_shape, _SCALES, self, index, "scales")


def scale_name(name: str) -> str:
  """The tensor of scales that belongs to a quantised `X.weight`."""
  return name.removesuffix("weight") + "scale"


def tensors(config: ModelConfig) -> Iterator[Tensor]:
  """Every tensor of a released folder of this model; 96,085 of the released one.

  Raises:
    ConfigError: see `leaves`.
  """
  for leaf in leaves(config):
    yield from leaf.tensors()


def leaves(config: ModelConfig) -> Iterator[Leaf]:
  """Every array of the model's state that comes from released tensors.

  Raises:
    ConfigError: a mode, a residual or a width that the released layout cannot hold.
  """
  _check(config)
  c = config
  alone = _Stack("", ("",))
  yield alone.leaf("embed/weight", "embed.weight", (c.vocab_size, c.d_model))
  tables = dict(zip(c.engram_layers, parameters.engram_rows(c), strict=True))
  for run, (first, count) in enumerate(c.layers.runs()):
    stack = _Stack(f"runs/{run}/", [f"layers.{first + i}." for i in range(count)])
    if first in tables:
      yield from _engram(c, stack, tables[first])
    yield from _layer(c, stack, c.layers[first], c.n_experts)
  yield alone.norm("norm", "norm", c.d_model)
  yield alone.leaf("head/weight", "head.weight", (c.vocab_size, c.d_model))
  if c.draft_layers:
    yield from _drafts(c)
  if c.vision_layers:
    yield from _vision(c)


class _Stack:
  """Makes leaves of layers that are stacked: `path` of theirs, `prefixes` of each one's names."""

  def __init__(self, path: str, prefixes: Sequence[str]):
    self.path, self.prefixes = path, tuple(prefixes)
    self.axes = (len(prefixes),) if path else ()

  def leaf(self, path: str, name: str, shape: tuple[int, ...], encoding: Encoding = "bf16", **more):
    names = tuple(prefix + name for prefix in self.prefixes)
    return Leaf(self.path + path, self.axes, names, shape, encoding, **more)

  def norm(self, path: str, name: str, width: int) -> Leaf:
    return self.leaf(f"{path}/weight", f"{name}.weight", (width,))

  def linear(self, path: str, name: str, outputs: int, inputs: int, encoding: Encoding) -> Leaf:
    shape = (outputs, inputs)
    return self.leaf(f"{path}/weight", f"{name}.weight", shape, encoding, layout="transposed")

  def experts(self, matrix: str, count: int, outputs: int, inputs: int) -> Leaf:
    names = tuple(
      f"{prefix}ffn.experts.{e}.{matrix}.weight" for prefix in self.prefixes for e in range(count)
    )
    return Leaf(
      f"{self.path}ffn/experts/{matrix}", (*self.axes, count), names, (outputs, inputs), "mxfp4",
      layout="transposed",
    )  # fmt: skip


def _layer(
  c: ModelConfig, stack: _Stack, spec: schedule_lib.LayerSpec, experts: int
) -> Iterator[Leaf]:
  """One run of backbone layers, or the draft layers."""
  D, F, heads = c.d_model, c.expert_dim, c.n_heads * c.head_dim
  yield stack.norm("attn_norm", "attn_norm", D)
  yield stack.norm("ffn_norm", "ffn_norm", D)
  mixes = (2 + c.streams) * c.streams
  for sublayer in ("attn", "ffn"):
    for name, shape in (("fn", (mixes, c.streams * D)), ("base", (mixes,)), ("scale", (3,))):
      yield stack.leaf(f"hc_{sublayer}/{name}", f"hc_{sublayer}_{name}", shape, "f32")

  yield stack.leaf("attn/sink", "attn.attn_sink", (c.n_heads,), "f32")
  yield stack.linear("attn/wq_a", "attn.wq_a", c.q_rank, D, "fp8_tile")
  yield stack.norm("attn/q_norm", "attn.q_norm", c.q_rank)
  yield stack.linear("attn/wq_b", "attn.wq_b", heads, c.q_rank, "fp8_tile")
  yield stack.linear("attn/wkv", "attn.wkv", c.head_dim, D, "fp8_tile")
  yield stack.norm("attn/kv_norm", "attn.kv_norm", c.head_dim)
  yield stack.leaf(
    "attn/output/wo_a/weight", "attn.wo_a.weight", (c.o_groups * c.o_rank, heads // c.o_groups),
    "fp8_tile", layout="grouped", groups=c.o_groups,
  )  # fmt: skip
  yield stack.linear("attn/output/wo_b", "attn.wo_b", D, c.o_groups * c.o_rank, "fp8_tile")
  if spec.is_source:
    yield stack.linear("attn/compressor/wkv", "attn.compressor.wkv", c.head_dim, D, "bf16")
    if spec.ratio > 1:
      yield stack.linear("attn/compressor/wgate", "attn.compressor.wgate", c.head_dim, D, "bf16")
    yield stack.norm("attn/compressor/norm", "attn.compressor.norm", c.head_dim)
  if spec.owns_index_keys:
    yield stack.linear("attn/index_keys/wk", "attn.indexer.wk", c.index_dim, c.head_dim, "bf16")
    yield stack.norm("attn/index_keys/k_norm", "attn.indexer.k_norm", c.index_dim)
  if spec.has_indexer:
    queries = c.index_heads * c.index_dim
    yield stack.linear("attn/indexer/wq_b", "attn.indexer.wq_b", queries, c.q_rank, "fp8_tile")
    yield stack.linear(
      "attn/indexer/weights_proj", "attn.indexer.weights_proj", c.index_heads, D, "bf16"
    )

  yield stack.leaf("ffn/gate/weight", "ffn.gate.weight", (experts, D))
  yield stack.leaf("ffn/gate/bias", "ffn.gate.bias", (experts,), "f32")
  if c.vision_layers:
    yield stack.leaf("ffn/gate/bias_image", "ffn.gate.bias_vl", (experts,), "f32")
  for matrix, outputs, inputs in (("w1", F, D), ("w3", F, D), ("w2", D, F)):
    yield stack.experts(matrix, experts, outputs, inputs)
    if c.shared_experts:
      name = f"ffn.shared_experts.{matrix}"
      yield stack.linear(f"ffn/shared/{matrix}", name, outputs, inputs, "fp8_tile")


def _engram(c: ModelConfig, stack: _Stack, rows: int) -> Iterator[Leaf]:
  M, D = c.streams, c.d_model
  columns = (c.engram_max_ngram - 1) * c.engram_heads * c.engram_dim
  yield stack.leaf("engram/table", "engram.embed.weight", (rows, c.engram_dim), "fp8_row")
  yield stack.linear("engram/wkv", "engram.wkv", (M + 1) * D, columns, "fp8_tile")
  for name in ("q_weight", "k_weight"):
    yield stack.leaf(f"engram/{name}", f"engram.{name}", (M, D), or_f32=True)


def _drafts(c: ModelConfig) -> Iterator[Leaf]:
  """The draft layers; what they have once is stored with the first or the last of them."""
  D, rank, last = c.d_model, c.draft_markov_rank, c.draft_layers - 1
  stack = _Stack("drafts/layers/", [f"mtp.{s}." for s in range(c.draft_layers)])
  yield from _layer(c, stack, schedule_lib.LayerSpec("swa"), c.draft_experts or c.n_experts)
  alone = _Stack("", ("",))
  targets = len(c.draft_target_layers)
  yield alone.linear("drafts/main_proj", "mtp.0.main_proj", D, targets * D, "fp8_tile")
  yield alone.norm("drafts/main_norm", "mtp.0.main_norm", D)
  yield alone.norm("drafts/norm", f"mtp.{last}.norm", D)
  for side in ("embed", "head"):
    name = f"mtp.{last}.markov_head.{side}.weight"
    yield alone.leaf(f"drafts/markov/{side}", name, (c.vocab_size, rank))
  name = f"mtp.{last}.confidence_head.proj"
  yield alone.linear("drafts/confidence", name, 1, D + rank, "bf16")


def _vision(c: ModelConfig) -> Iterator[Leaf]:
  """Vision tower, aligner and the learned delimiter rows."""
  D, width, inner = c.d_model, c.vision_dim, c.vision_ffn_dim
  alone = _Stack("", ("",))
  blocks = _Stack("vision/blocks/", [f"vision.blocks.{b}." for b in range(c.vision_layers)])

  def biased(stack: _Stack, path: str, name: str, outputs: int, inputs: int) -> Iterator[Leaf]:
    yield stack.linear(path, name, outputs, inputs, "bf16")
    yield stack.leaf(f"{path}/bias", f"{name}.bias", (outputs,))

  yield from biased(alone, "vision/patch", "vision.patch_embed.proj", width, 3 * c.vision_patch**2)
  for norm in ("norm1", "norm2"):
    yield blocks.norm(norm, norm, width)
  yield from biased(blocks, "attn/wqkv", "attn.wqkv", 3 * width, width)
  yield from biased(blocks, "attn/wo", "attn.wo", width, width)
  yield blocks.linear("mlp/w1", "mlp.w1", 2 * inner, width, "bf16")
  yield blocks.linear("mlp/w2", "mlp.w2", width, inner, "bf16")
  yield alone.norm("vision/norm", "vision.norm", width)
  yield from biased(alone, "aligner/w1", "aligner.w1", D, width * c.vision_merge**2)
  yield from biased(alone, "aligner/w2", "aligner.w2", D, D)
  for name in ("start", "newline", "end"):
    yield alone.leaf(f"image/{name}", f"image_{name}", (D,))


def _check(c: ModelConfig) -> None:
  published.to_published(c)  # refuses what has no published field
  widths = ["d_model", "expert_dim", *(["engram_dim"] if c.engram_layers else [])]
  for name in widths:
    if getattr(c, name) % TILE:
      raise ConfigError(
        f"model.{name}: is {getattr(c, name)}; the released layout needs a multiple of {TILE}:"
        " values of a row share a scale by as many"
      )
