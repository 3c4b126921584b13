"""Every component of one sequence's attention state, described before any of it exists.

Allocation, sharding, byte counting and serialisation read this description and nothing else. The
released model keeps, per token of context,

    main KV      layers 2, 8, 14 (an entry per 2 tokens) and 20 (per token)   288 bytes an entry
    index keys   the same layers                                               68 bytes an entry

(3/2 + 1) * (288 + 68) = 890 bytes, and a bounded remainder that does not grow with the context.

Quantised rows are stored packed, as uint8: first the codes, then one scale per block of channels.

Source: arXiv 2609.19969, sections 2 and 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Literal

from hysparse_kernels.arguments import whole

from hysparse import config as config_lib
from hysparse import schedule as schedule_lib

Lifetime = Literal["global", "bounded", "scratch", "bookkeeping"]
Axis = Literal["layers", "batch", "rows", "pool"]

_ITEM_BYTES = {"uint8": 1, "bool": 1, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4}
_RING: tuple[Axis, ...] = ("layers", "batch", "rows")
_BLOCK_TOKENS = 128  # tokens in a block of the paged cache, at least


@dataclasses.dataclass(frozen=True)
class Part:
  """One array of a row: its shape without the axes that count rows, and its dtype.

  Rows that nothing was written to hold `fill`.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Literal["uint8", "bool", "bfloat16", "float16", "int32", "float32"]
  fill: int = 0

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Precision:
  """The dial: the format of each component that has a choice of them."""

  main_kv: config_lib.Format
  index_k: config_lib.Format
  window_kv: config_lib.Format
  plain_kv: config_lib.Format = "bf16"

  @classmethod
  def of(cls, config: config_lib.ModelConfig, numerics: str = "kvquant") -> Precision:
    """What a cache holds: the config's formats, or float32 everywhere under "exact" numerics."""
    if numerics == "exact":
      return cls("f32", "f32", "f32", "f32")
    return cls(config.main_kv, config.index_k, config.window_kv)


@dataclasses.dataclass(frozen=True)
class _Packing:
  """How a quantised format stores a row of channels."""

  code_bits: int
  block: int  # channels that share one scale, a byte each


_PACKED = {
  "fp4": _Packing(code_bits=4, block=16),  # E2M1, E4M3 scales
  "mxfp4": _Packing(code_bits=4, block=32),  # E2M1, E8M0 scales
  "fp8": _Packing(code_bits=8, block=32),  # E4M3, E8M0 scales
}
_PLAIN = {"bf16": "bfloat16", "f32": "float32"}


def stored_row(format: config_lib.Format, width: int) -> tuple[Part, ...]:
  """The arrays that hold one row of `width` channels in a format of the precision dial.

  Half-filled bytes and blocks take a whole one: 33 channels of fp4 are 17 + 3 bytes.
  """
  if format in _PLAIN:
    return (Part("values", (width,), _PLAIN[format]),)
  packing = _PACKED[format]
  return (
    Part("codes", (-(-width * packing.code_bits // 8),), "uint8"),
    Part("scales", (-(-width // packing.block),), "uint8"),
  )


@dataclasses.dataclass(frozen=True)
class Component:
  """One kind of state, alike on all layers that own a copy of it.

  Attributes:
    name: what it is; layers with another ratio have a component of the same name.
    layers: owners, each with its own copy; draft layers count on from the last backbone layer.
      Empty for what the sequence owns once.
    format: of the precision dial, or the dtype of what the dial does not reach.
    row: the arrays of one row.
    lifetime: "global" grows with the context and may outlive the request; "bounded" does not grow
      and lives with the active session; "scratch" lives for one call; "bookkeeping" addresses the
      others and holds no activations.
    rows_per_token: rows that each token of context adds to each copy, 0 unless it grows.
    rows: rows of each copy whatever the context.
    axes: what stands in front of a row in the arrays that the layers of a run share: "layers" of
      the run, "batch" of sequences, "rows", or the "pool" that all sequences' rows are in.
  """

  name: str
  layers: tuple[int, ...]
  format: str
  row: tuple[Part, ...]
  lifetime: Lifetime
  rows_per_token: Fraction = Fraction(0)
  rows: int = 0
  axes: tuple[Axis, ...] = ("batch", "rows")

  @property
  def copies(self) -> int:
    return len(self.layers) or 1

  @property
  def row_bytes(self) -> int:
    return sum(part.bytes for part in self.row)

  @property
  def bytes_per_token(self) -> Fraction:
    """Growth with the context, all copies together."""
    return self.copies * self.rows_per_token * self.row_bytes

  def rows_at(self, tokens: int) -> int:
    """Rows of one copy after `tokens` tokens: whole groups only, but begun blocks too."""
    grown = self.rows_per_token * tokens
    return self.rows + (math.ceil(grown) if self.lifetime == "bookkeeping" else math.floor(grown))

  def bytes_at(self, tokens: int) -> int:
    """Bytes of all copies after `tokens` tokens of context."""
    return self.copies * self.rows_at(tokens) * self.row_bytes

  def shape(self, part: Part, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """Of the array of a part, given the size of each of the `axes`."""
    return (*(sizes[axis] for axis in self.axes), *part.shape)


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """All components of one sequence's state."""

  components: tuple[Component, ...]
  block_tokens: int

  def __iter__(self) -> Iterator[Component]:
    return iter(self.components)

  def of(self, lifetime: Lifetime) -> tuple[Component, ...]:
    return tuple(c for c in self.components if c.lifetime == lifetime)

  def named(self, name: str) -> tuple[Component, ...]:
    return tuple(c for c in self.components if c.name == name)

  @property
  def global_bytes_per_token(self) -> Fraction:
    """Growth of the global cache: 890 for the released model."""
    return sum((c.bytes_per_token for c in self.of("global")), Fraction(0))

  def bytes_at(self, lifetime: Lifetime, tokens: int) -> int:
    """Bytes of everything with this lifetime after `tokens` tokens of context."""
    return sum(c.bytes_at(tokens) for c in self.of(lifetime))

  @property
  def bounded_bytes(self) -> int:
    """State of an active session that does not grow with its context."""
    return self.bytes_at("bounded", 0)


def layout(
  config: config_lib.ModelConfig,
  precision: Precision | None = None,
  *,
  block_tokens: int | None = None,
  call_tokens: int = 1,
) -> StateLayout:
  """Describes the attention state of one sequence.

  Args:
    config: the schedule, the widths and the precision dial.
    precision: other formats than the config's.
    block_tokens: tokens in a block of the paged global cache, a multiple of `config.alignment`; by
      default the first one from 128 up.
    call_tokens: tokens of one forward call; they size the scratch only.

  Raises:
    ConfigError: a block size that is no whole number, or cuts a group of tokens or a candidate
      block.
  """
  alignment = config.alignment
  if block_tokens is None:
    block_tokens = -(-_BLOCK_TOKENS // alignment) * alignment
  if whole("block_tokens", block_tokens, error=config_lib.ConfigError) % alignment:
    raise config_lib.ConfigError(
      f"block_tokens: is {block_tokens}; must be a multiple of {alignment}, the schedule's ratios"
      " and candidate blocks"
    )
  precision = precision or Precision.of(config)
  components = [*_global(config, precision), *_bounded(config, precision)]
  rings = tuple(layer for c in components if c.name.startswith("window") for layer in c.layers)
  components += _scratch(config, precision, rings, call_tokens)
  components += _bookkeeping(config, rings, block_tokens)
  return StateLayout(tuple(components), block_tokens)


def _owners(
  config: config_lib.ModelConfig, key: Callable[[schedule_lib.LayerSpec], int | str | None]
) -> dict[int | str, tuple[int, ...]]:
  """Layers by the value of `key`, in order; layers where it is None or 0 own nothing."""
  owners: dict[int | str, tuple[int, ...]] = {}
  for i, spec in enumerate(config.layers):
    if value := key(spec):
      owners[value] = (*owners.get(value, ()), i)
  return owners


def _global(config: config_lib.ModelConfig, precision: Precision) -> Iterator[Component]:
  row = stored_row(precision.main_kv, config.head_dim)
  for ratio, layers in _owners(config, lambda s: s.is_source and s.ratio).items():
    yield _grown("main_kv", layers, precision.main_kv, row, ratio)
  row = stored_row(precision.index_k, config.index_dim)
  for ratio, layers in _owners(config, lambda s: s.owns_index_keys and s.ratio).items():
    yield _grown("index_keys", layers, precision.index_k, row, ratio)
  plain_heads = _owners(config, lambda s: not s.has_window and (s.kv_heads or config.n_heads))
  for heads, layers in plain_heads.items():
    dtype = _PLAIN[precision.plain_kv]
    row = tuple(Part(name, (heads, config.head_dim), dtype) for name in ("keys", "values"))
    yield _grown("plain_kv", layers, precision.plain_kv, row, 1)


def _grown(
  name: str, layers: tuple[int, ...], format: str, row: tuple[Part, ...], ratio: int
) -> Component:
  return Component(name, layers, format, row, "global", Fraction(1, ratio), axes=("pool",))


def _bounded(config: config_lib.ModelConfig, precision: Precision) -> Iterator[Component]:
  rings = _owners(config, lambda s: s.has_window and s.side)
  if config.draft_layers:
    first = len(config.layers)
    rings["draft"] = tuple(range(first, first + config.draft_layers))
  row = stored_row(precision.window_kv, config.head_dim)
  for side, layers in rings.items():
    yield Component(
      f"window_{side}", layers, precision.window_kv, row, "bounded", rows=config.window, axes=_RING
    )
  row = tuple(Part(name, (config.head_dim,), "float32") for name in ("kv", "score"))
  for ratio, layers in _owners(config, lambda s: s.is_source and s.ratio).items():
    if ratio > 1:
      yield Component("partial_group", layers, "f32", row, "bounded", rows=ratio - 1)
  if config.engram_layers:
    row = (Part("tokens", (), "int32", fill=-1),)
    yield Component("engram_history", (), "int32", row, "bounded", rows=config.engram_max_ngram - 1)


def kept_tokens(config: config_lib.ModelConfig) -> int:
  """How far back into a call bounded state can reach: more of its last tokens never matter."""
  windows = [config.window for spec in config.layers if spec.has_window]
  groups = [spec.ratio - 1 for spec in config.layers]
  return max([1, *windows, *groups, config.engram_max_ngram - 1])


def _scratch(
  config: config_lib.ModelConfig, precision: Precision, rings: tuple[int, ...], call_tokens: int
) -> Iterator[Component]:
  # Bounded state is written when a call ends and it is known how many of its tokens stay: until
  # then what they would write waits beside it.
  kept = min(call_tokens, kept_tokens(config))
  if rings:
    row = stored_row(precision.window_kv, config.head_dim)
    yield Component("call_keys", rings, precision.window_kv, row, "scratch", rows=kept)
  row = tuple(Part(name, (config.head_dim,), "float32") for name in ("kv", "score"))
  sources = tuple(i for i, spec in enumerate(config.layers) if spec.is_source and spec.ratio > 1)
  if sources:
    yield Component("call_groups", sources, "f32", row, "scratch", rows=kept)
  if config.engram_layers:
    row = (Part("tokens", (), "int32"),)
    yield Component("call_tokens", (), "int32", row, "scratch", rows=kept)


def _bookkeeping(
  config: config_lib.ModelConfig, rings: tuple[int, ...], block_tokens: int
) -> Iterator[Component]:
  if rings:
    row = (Part("positions", (), "int32", fill=-1),)
    yield Component("ring_tags", rings, "int32", row, "bookkeeping", rows=config.window, axes=_RING)
  row = (Part("blocks", (), "int32", fill=-1),)
  yield Component("block_table", (), "int32", row, "bookkeeping", Fraction(1, block_tokens))
  row = (Part("length", (), "int32"), Part("error", (), "bool"))
  yield Component("status", (), "int32 + bool", row, "bookkeeping", rows=1, axes=("batch",))
