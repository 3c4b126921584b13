"""The layer schedule: one readable string, parsed into one `LayerSpec` per layer.

    swa*2 (full/2 reuse*5)*3 | full/1+candidates reuse*3 (reindex reuse*3)*4

is the released model: two window-only layers; three times a source that compresses two tokens into
an entry, followed by five layers that reuse its selection; the bar between the causal encoder and
the decoder; a source with one entry a token that also publishes a candidate pool; and so on.

    schedule := item*  ["|" item*]
    item     := layer ["*" count]  |  "(" item* ")" "*" count
    layer    := "swa" | "full/r" ["+candidates"] | "reindex" ["+candidates"] | "reuse"
              | "dense/r" | "mha" | "gqa/n"

`reindex/r` and `reuse/r` may repeat their source's ratio. Engram layers are a field beside the
string. Nothing else in the project decides what a layer is.

Source: arXiv 2609.19969, section 2 (CSA2, called HySparse here); `dense` follows arXiv 2602.03560.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Literal

Mode = Literal["swa", "full", "reindex", "reuse", "dense", "mha", "gqa"]

SOURCES = ("full", "dense")  # own main KV (and index keys if anyone scores them)
SPARSE = ("full", "reindex", "reuse")  # attend to a selection
PLAIN = ("mha", "gqa")  # ordinary attention, no window and no latent


class ScheduleError(ValueError):
  """A schedule that cannot be read or built; the message names the layer."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """What one layer is. Layer numbers count from 0.

  Attributes:
    mode: how the global branch gets its keys and its selection.
    ratio: tokens per compressed entry of the source this layer reads; 0 without one.
    kv_source: layer whose main KV this layer reads (itself for a source), or None.
    index_source: layer whose selection this layer attends to (itself if it selects; a dense layer
      is the index source of those that reuse its oracle selection), or None.
    candidate_role: "source" publishes the candidate pool, "pool" selects only inside it.
    side: "encoder" before the bar, "decoder" after it; all "encoder" without a bar.
    engram: whether n-gram memory is added to the streams before this layer.
    kv_heads: K and V heads of a plain layer ("gqa/n"); None for "mha" (all) and the others.
    owns_index_keys: a source whose entries some layer's indexer scores.
  """

  mode: Mode
  ratio: int = 0
  kv_source: int | None = None
  index_source: int | None = None
  candidate_role: Literal["source", "pool"] | None = None
  side: Literal["encoder", "decoder"] = "encoder"
  engram: bool = False
  kv_heads: int | None = None
  owns_index_keys: bool = False

  @property
  def is_source(self) -> bool:
    return self.mode in SOURCES

  @property
  def is_sparse(self) -> bool:
    return self.mode in SPARSE

  @property
  def has_window(self) -> bool:
    return self.mode not in PLAIN

  @property
  def has_indexer(self) -> bool:
    """Own indexer queries: scores entries and selects."""
    return self.mode in ("full", "reindex")

  @property
  def run_key(self) -> tuple:
    """Layers with equal keys that stand side by side share a parameter stack."""
    return (self.mode, self.ratio, self.engram, self.side, self.candidate_role, self.kv_heads)

  def __str__(self) -> str:
    """This layer in schedule notation."""
    if self.mode == "gqa":
      return f"gqa/{self.kv_heads}"
    text = f"{self.mode}/{self.ratio}" if self.is_source else self.mode
    return text + ("+candidates" if self.candidate_role == "source" else "")


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A validated schedule: a tuple of layers that also knows its bar and its sources."""

  layers: tuple[LayerSpec, ...]
  decoder_start: int | None = None

  def __len__(self) -> int:
    return len(self.layers)

  def __iter__(self):
    return iter(self.layers)

  def __getitem__(self, index: int) -> LayerSpec:
    return self.layers[index]

  def __str__(self) -> str:
    return format_schedule(self)

  @property
  def kv_sources(self) -> tuple[int, ...]:
    """Layers that own main KV."""
    return tuple(i for i, s in enumerate(self.layers) if s.is_source)

  @property
  def index_sources(self) -> tuple[int, ...]:
    """Layers whose indexer selects (the trained ones; dense layers choose by their own mass)."""
    return tuple(i for i, s in enumerate(self.layers) if s.has_indexer)

  @property
  def engram_layers(self) -> tuple[int, ...]:
    return tuple(i for i, s in enumerate(self.layers) if s.engram)

  @property
  def candidate_source(self) -> int | None:
    return next((i for i, s in enumerate(self.layers) if s.candidate_role == "source"), None)

  @property
  def ratio_lcm(self) -> int:
    """Least common multiple of all compression ratios (1 without a source)."""
    return math.lcm(*(s.ratio for s in self.layers if s.is_source))

  def runs(self) -> tuple[tuple[int, int], ...]:
    """(first layer, layers) of each run of equal layers, in order."""
    runs: list[tuple[int, int]] = []
    for i, spec in enumerate(self.layers):
      # What publishes stands alone, so that a scanned run closes over what it reads; and each
      # Engram layer has a table of its own size.
      alone = _publishes(spec) or spec.engram
      if runs and spec.run_key == self.layers[i - 1].run_key and not alone:
        runs[-1] = (runs[-1][0], runs[-1][1] + 1)
      else:
        runs.append((i, 1))
    return tuple(runs)

  def replay_unsupported_reason(self) -> str | None:
    """Why a prompt's decoder part cannot be replayed from its last W tokens, or None if it can.

    Source: arXiv 2609.19969, section 4 (decoder SWA bounded replay).
    """
    if self.decoder_start is None:
      return "the schedule has no encoder|decoder bar"
    first = self.layers[self.decoder_start]
    if not first.is_source and first.mode not in PLAIN:
      return (
        f"layer {self.decoder_start} ({first}) begins the decoder and is no KV source, which alone"
        " can take in the tokens that skip the decoder"
      )
    for i in range(self.decoder_start, len(self.layers)):
      spec = self.layers[i]
      if spec.is_source and i > self.decoder_start:
        return (
          f"layer {i} ({spec}) is a KV source inside the decoder: its entries need every token's"
          " decoder state"
        )
      if spec.mode == "dense":
        return f"layer {i} ({spec}) attends to every entry: it needs every token's decoder state"
      if spec.mode in PLAIN:
        return f"layer {i} ({spec}) keeps K and V of every token inside the decoder"
      if spec.engram and i > self.decoder_start:
        return f"layer {i} adds Engram memory inside the decoder"
    return None


def _publishes(spec: LayerSpec) -> bool:
  return spec.is_source or spec.has_indexer


# --- Reading -------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*([()|]|\*\s*[0-9]+|[A-Za-z][A-Za-z0-9/+_.-]*|\S)")
_LAYER = re.compile(r"([a-z]+)(?:/([0-9]+))?(\+candidates)?")
_MAX_LAYERS = 10_000
_MAX_DEPTH = 50


def parse(
  text: str,
  engram_layers: Sequence[int] = (),
  *,
  num_layers: int | None = None,
  decoder_start: int | None = None,
) -> Schedule:
  """Reads a schedule string.

  Args:
    text: see the module docstring.
    engram_layers: layers that add n-gram memory.
    num_layers: if given, the number of layers that the schedule must have.
    decoder_start: first decoder layer, for a string without a bar.

  Raises:
    ScheduleError: in one line, with the layer number and what would be legal.
  """
  tokens = _TOKEN.findall(text)
  if not tokens:
    raise ScheduleError("schedule: is empty; write for example 'swa (full/2 reuse*2)*2'")
  words, bar, _ = _items(tokens, depth=0, start=0)
  if bar is not None and decoder_start is not None and bar != decoder_start:
    raise ScheduleError(f"schedule: the bar stands before layer {bar}, not {decoder_start}")
  drafts = [_read_layer(i, word) for i, word in enumerate(words)]
  return build(
    drafts,
    engram_layers,
    num_layers=num_layers,
    decoder_start=decoder_start if bar is None else bar,
  )


def _items(tokens: list[str], depth: int, start: int) -> tuple[list[str], int | None, list[str]]:
  """Expands tokens up to a closing bracket or the end: (layer words, bar, tokens left).

  `start` is the number of the first layer to come, for messages.
  """
  if depth > _MAX_DEPTH:
    raise ScheduleError(f"schedule: more than {_MAX_DEPTH} brackets inside each other")
  words: list[str] = []
  bar = None
  last: list[str] = []  # what a following *n repeats
  while tokens and tokens[0] != ")":
    token, tokens = tokens[0], tokens[1:]
    here = start + len(words)
    if token == "|":
      if depth or bar is not None:
        where = "inside brackets" if depth else "a second time"
        raise ScheduleError(f"schedule: '|' stands {where}, before layer {here}")
      bar, last = here, []
    elif token.startswith("*"):
      count = int(token[1:] or 0)
      if not last:
        raise ScheduleError(f"schedule: '{token}' before layer {here} repeats nothing")
      if count < 1:
        raise ScheduleError(f"schedule: '{token}' before layer {here} must repeat at least once")
      if here + len(last) * (count - 1) > _MAX_LAYERS:
        raise ScheduleError(f"schedule: more than {_MAX_LAYERS} layers")
      words += last * (count - 1)
      last = []
    elif token == "(":
      last, _, tokens = _items(tokens, depth + 1, here)
      if not tokens:
        raise ScheduleError(f"schedule: '(' before layer {here} is never closed")
      if not last:
        raise ScheduleError(f"schedule: empty brackets before layer {here}")
      tokens = tokens[1:]
      words += last
    else:
      last = [token]
      words.append(token)
  if tokens and depth == 0:
    raise ScheduleError(f"schedule: ')' before layer {start + len(words)} was never opened")
  return words, bar, tokens


def _read_layer(index: int, word: str) -> LayerSpec:
  """The layer that a word alone describes; sources are resolved by `build`."""
  match = _LAYER.fullmatch(word)
  mode, number, candidates = match.groups() if match else (word, None, None)
  modes = ("swa", "full", "reindex", "reuse", "dense", "mha", "gqa")
  if mode not in modes:
    raise ScheduleError(f"layer {index}: unknown mode '{word}'; the modes are {', '.join(modes)}")
  if mode in ("full", "dense", "gqa") and number is None:
    example = "gqa/2, with the number of K and V heads" if mode == "gqa" else f"{mode}/2"
    raise ScheduleError(f"layer {index}: '{word}' needs a number: write {example}")
  if number is not None and mode in ("swa", "mha"):
    raise ScheduleError(f"layer {index}: '{word}': {mode} takes no number")
  if number is not None and int(number) < 1:
    raise ScheduleError(f"layer {index}: '{word}': the number must be at least 1")
  value = int(number or 0)
  return LayerSpec(
    mode=mode,
    ratio=0 if mode == "gqa" else value,
    kv_heads=value if mode == "gqa" else None,
    candidate_role="source" if candidates else None,
  )


# --- Checking ------------------------------------------------------------------------------------


def build(
  drafts: Sequence[LayerSpec],
  engram_layers: Sequence[int] = (),
  *,
  num_layers: int | None = None,
  decoder_start: int | None = None,
) -> Schedule:
  """Resolves who reads whom and refuses what cannot be built.

  `drafts` need only mode, ratio (0 on reindex and reuse: their source's), kv_heads and the
  "source" candidate role.

  Raises:
    ScheduleError: naming the layer.
  """
  count = len(drafts)
  if num_layers is not None and count != num_layers:
    raise ScheduleError(f"schedule: describes {count} layers, the model has {num_layers}")
  if decoder_start is not None and not 0 < decoder_start < count:
    raise ScheduleError(
      f"schedule: the decoder starts at layer {decoder_start} of {count}; there must be a layer on"
      " both sides of the bar"
    )
  for layer in engram_layers:
    if not 0 <= layer < count:
      raise ScheduleError(f"engram_layers: layer {layer} is outside 0..{count - 1}")
  if len(set(engram_layers)) != len(tuple(engram_layers)):
    raise ScheduleError(f"engram_layers: {list(engram_layers)} names a layer twice")

  kv_source = index_source = pool_source = None
  layers: list[LayerSpec] = []
  for i, draft in enumerate(drafts):
    spec = dataclasses.replace(
      draft,
      side="decoder" if decoder_start is not None and i >= decoder_start else "encoder",
      engram=i in engram_layers,
      owns_index_keys=draft.mode == "full",
    )
    if spec.candidate_role == "source":
      if not spec.has_indexer:
        raise ScheduleError(
          f"layer {i}: '{spec.mode}' selects nothing by score, so it cannot publish candidates;"
          " full and reindex layers can"
        )
      if pool_source is not None:
        raise ScheduleError(
          f"layer {i}: a second candidate source; layer {pool_source} is one already"
        )
    if spec.is_source:
      if pool_source is not None:
        raise ScheduleError(
          f"layer {i}: '{spec}' is a source after the candidate source (layer {pool_source}), whose"
          " pool is of other entries"
        )
      kv_source = index_source = i
      spec = dataclasses.replace(spec, kv_source=i, index_source=i)
    elif spec.is_sparse:
      if kv_source is None:
        raise ScheduleError(
          f"layer {i}: '{spec.mode}' comes before any full or dense layer it could read"
        )
      ratio = layers[kv_source].ratio
      if spec.ratio not in (0, ratio):
        raise ScheduleError(
          f"layer {i}: ratio {spec.ratio} differs from {ratio}, the ratio of its source, layer"
          f" {kv_source}"
        )
      if spec.mode == "reindex":
        index_source = i
        if pool_source is not None:
          spec = dataclasses.replace(spec, candidate_role="pool")
        # A dense source needs index keys only because somebody scores its entries.
        layers[kv_source] = dataclasses.replace(layers[kv_source], owns_index_keys=True)
      spec = dataclasses.replace(spec, ratio=ratio, kv_source=kv_source, index_source=index_source)
    if spec.candidate_role == "source":
      pool_source = i
    layers.append(spec)
  return Schedule(tuple(layers), decoder_start)


# --- Writing -------------------------------------------------------------------------------------


def format_schedule(schedule: Schedule) -> str:
  """The shortest string that `parse` reads back as this schedule, Engram layers aside."""
  words = tuple(str(spec) for spec in schedule.layers)
  bar = schedule.decoder_start
  if bar is None:
    return _shortest(words)
  return f"{_shortest(words[:bar])} | {_shortest(words[bar:])}"


def _shortest(words: tuple[str, ...]) -> str:
  """Shortest notation; among equals, groups that begin with a source or selector read best."""

  @functools.cache
  def best(words: tuple[str, ...]) -> tuple[int, int, str]:
    if not words:
      return (0, 0, "")
    options = []
    for period in range(1, len(words) // 2 + 1):
      unit = words[:period]
      repeats = 1
      while words[repeats * period : (repeats + 1) * period] == unit:
        repeats += 1
      if repeats == 1 or (period > 1 and len(set(unit)) == 1):
        continue
      inner = best(unit)
      text = f"{inner[2]}*{repeats}" if period == 1 else f"({inner[2]})*{repeats}"
      awkward = inner[1] + (period > 1 and unit[0] == "reuse")
      options.append(join(text, awkward, best(words[repeats * period :])))
    options.append(join(words[0], 0, best(words[1:])))
    return min(options)

  def join(text: str, awkward: int, rest: tuple[int, int, str]) -> tuple[int, int, str]:
    whole = f"{text} {rest[2]}".rstrip()
    return (len(whole), awkward + rest[1], whole)

  return best(words)[2]
