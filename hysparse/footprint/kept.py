"""What a model keeps of its context, whatever its family: a layout, and how layers read it."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from hysparse import config as config_lib
from hysparse.cache import layout as layout_lib


@dataclasses.dataclass(frozen=True)
class Reads:
  """What one layer attends to.

  Attributes:
    channels: values in an entry (keys and values apart if they are, indexer key included).
    rate: entries per token of context; 0 where only a window is seen.
    owns: whether the layer keeps them; otherwise it reads another's.
  """

  channels: int
  rate: Fraction
  owns: bool


@dataclasses.dataclass(frozen=True)
class Kept:
  """A model as its cache sees it.

  Attributes:
    name: of the model, for tables.
    family: "hysparse", or the `model_type` of its config.json.
    layout: the components of a sequence's state.
    layers: how each layer reads them.
    head_channels: keys and values of all heads of one layer, if every head had its own.
    precision: what entries are stored in, by name; with its source where it is another engine's.
    max_positions: the longest context; None if the config does not say.
    config: of our own models.
    dial: of our own models.
  """

  name: str
  family: str
  layout: layout_lib.StateLayout
  layers: tuple[Reads, ...]
  head_channels: int
  precision: str
  max_positions: int | None
  config: config_lib.ModelConfig | None = None
  dial: layout_lib.Precision | None = None

  @property
  def per_token(self) -> Fraction:
    """Bytes that each token of context adds."""
    return self.layout.global_bytes_per_token


def kept(
  config: config_lib.ModelConfig,
  *,
  name: str,
  dial: layout_lib.Precision | None = None,
  block_tokens: int | None = None,
) -> Kept:
  """One of our own models.

  Args:
    config: the schedule and the widths.
    name: for tables.
    dial: formats; by default the config's.
    block_tokens: of the paged cache.

  Raises:
    ConfigError: a block size that does not fit the schedule.
  """
  dial = dial or layout_lib.Precision.of(config)
  return Kept(
    name=name,
    family="hysparse",
    layout=layout_lib.layout(config, dial, block_tokens=block_tokens),
    layers=tuple(_reads(config, layer) for layer in range(len(config.layers))),
    head_channels=2 * config.n_heads * config.head_dim,
    precision=_named(config, dial),
    max_positions=config.max_positions,
    config=config,
    dial=dial,
  )


def _reads(config: config_lib.ModelConfig, layer: int) -> Reads:
  spec = config.layers[layer]
  if not spec.has_window:  # plain attention: keys and values of its own
    heads = spec.kv_heads or config.n_heads
    return Reads(2 * heads * config.head_dim, Fraction(1), owns=True)
  source = layer if spec.is_source else spec.kv_source
  if source is None:
    return Reads(config.head_dim, Fraction(0), owns=True)
  keys = config.index_dim if config.layers[source].owns_index_keys else 0
  return Reads(config.head_dim + keys, Fraction(1, config.layers[source].ratio), spec.is_source)


def _named(config: config_lib.ModelConfig, dial: layout_lib.Precision) -> str:
  """The formats that the model's components are in: "main fp4, index mxfp4, window fp8"."""
  used = []
  if any(spec.is_source for spec in config.layers):
    used.append(f"main {dial.main_kv}")
  if any(spec.owns_index_keys for spec in config.layers):
    used.append(f"index {dial.index_k}")
  if any(spec.has_window for spec in config.layers):
    used.append(f"window {dial.window_kv}")
  if not all(spec.has_window for spec in config.layers):
    used.append(f"plain {dial.plain_kv}")
  return ", ".join(used)
