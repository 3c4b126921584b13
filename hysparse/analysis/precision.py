"""What each format of the precision dial does to real latents, against its bytes.

    measured = dial(hysparse.load("runs/demo", numerics="exact"), text)
    measured.frame, measured.plot()
    logit_change("runs/demo", text, {"released": {}, "FP8": {"main_kv": "fp8"}})

Latents are those of a forward pass that rounds nothing; each is then stored and read back in every
format. Errors are relative: the root mean square of the difference over that of the values. What
the error does is measured one component at a time, everything else unrounded:

- main_kv, window_kv: how far the attention output of the layer that owns them moves;
- index_k (keys and queries): which share of the selected entries changes.

Source: arXiv 2609.19969, section 4 (formats).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.dense_attention import dense_attention, merge
from hysparse_kernels.formats import Stored, fake_quant
from hysparse_kernels.indexer import select
from hysparse_kernels.sparse_attention import View, sparse_attention

from hysparse.analysis.frames import frame
from hysparse.analysis.prompts import prompt_of
from hysparse.analysis.selected import share
from hysparse.cache.layout import stored_row
from hysparse.config import Config, ConfigError, Format, ModelConfig
from hysparse.footprint import text
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Call
from hysparse.nn.model import Model, forward
from hysparse.schedule import LayerSpec

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot
  from hysparse.conversion.load import Loaded

FORMATS = get_args(Format)
_EFFECTS = {
  "main_kv": "attention output moves",
  "index_k": "selected entries change",
  "window_kv": "attention output moves",
}


@dataclasses.dataclass(frozen=True)
class Measured:
  """One component in one format, the mean over the layers that own it.

  Attributes:
    component: of the dial.
    format: it was stored in.
    bytes: of an entry of this model's width, scales included.
    error: relative, of the values (index_k: of keys and queries).
    effect: see the module.
    released: whether the model's config says so.
  """

  component: str
  format: str
  bytes: int
  error: float
  effect: float
  released: bool


@dataclasses.dataclass(frozen=True)
class Dial:
  """All components in all formats."""

  model: ModelConfig
  points: tuple[Measured, ...]

  @property
  def frame(self) -> pandas.DataFrame:
    rows = [dataclasses.asdict(p) | {"effect_is": _EFFECTS[p.component]} for p in self.points]
    return frame(rows, ["component", "format"])

  def __str__(self) -> str:
    lines = [("component", "format", "bytes", "error", "", "effect")]
    lines += [
      (p.component, p.format, str(p.bytes), _percent(p.error), _EFFECTS[p.component],
       _percent(p.effect)) for p in self.points
    ]  # fmt: skip
    return text.table(lines, right=(2, 3, 5))

  __repr__ = __str__

  def _repr_html_(self) -> str:
    return self.frame.to_html(border=0, float_format="{:.2g}".format)

  def plot(self) -> Plot:
    """Error and effect against bytes an entry; released formats are marked."""
    from hysparse.analysis import precision_plot

    return precision_plot.dial(self)


def dial(
  model: Loaded | tuple[Config, nnx.GraphDef, nnx.State],
  prompt: str | Sequence[int],
  formats: Sequence[str] = FORMATS,
) -> Dial:
  """Measures every component that the schedule has.

  Args:
    model: as in `selection`, with numerics "exact".
    prompt: the same; of some hundred tokens, so that there is something to select from.
    formats: of the dial.

  Raises:
    ConfigError: other numerics, an unknown format, or a prompt that does not fit.
  """
  seen = prompt_of(model, prompt)
  config = seen.config.model
  if seen.config.train.numerics != "exact":
    raise ConfigError(
      f"numerics: is {seen.config.train.numerics!r}; latents are measured under 'exact'"
    )
  for name in formats:
    if name not in FORMATS:
      raise ConfigError(f"formats: has {name!r}; must be of {', '.join(FORMATS)}")
  found = _measure(
    seen.graphdef, seen.state, seen.padded_S, seen.count, config=config, formats=tuple(formats)
  )
  points = []
  for component, layers in found.items():
    width = config.index_dim if component == "index_k" else config.head_dim
    if component == "index_k":
      effects = np.stack([_changed(numbers, seen.count) for numbers in layers])
    else:
      effects = np.stack([numbers["effect"] for numbers in layers])
    errors = np.stack([numbers["error"] for numbers in layers])
    for i, format in enumerate(formats):
      size = sum(part.bytes for part in stored_row(format, width))
      means = float(errors[:, i].mean()), float(effects[:, i].mean())
      released = getattr(config, component) == format
      points.append(Measured(component, format, size, *means, released))
  return Dial(config, tuple(points))


def _percent(value: float) -> str:
  return "" if np.isnan(value) else f"{value:.2%}"


def _changed(numbers: Mapping[str, jax.Array], count: int) -> np.ndarray:
  """By format, the share of entries selected without rounding that are not selected with it."""
  before = np.asarray(numbers["before"])[0, :count]
  afters = np.asarray(numbers["after"])[:, 0, :count]
  choosing = (before >= 0).any(1)
  if not choosing.any():
    return np.full(len(afters), np.nan)
  return np.array([1 - share(before, after)[choosing].mean() for after in afters])


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "formats"))
def _measure(graphdef, state, tokens_S, count, *, config: ModelConfig, formats: Sequence[str]):
  """By component, a list over layers of numbers by format."""
  model: Model = nnx.merge(graphdef, state)
  batch = Batch.of(tokens_S[None], jnp.asarray([count]), is_prompt=True)
  traces = model.hidden(batch, call=Call(capture=True)).aux.trace
  found: dict[str, list] = {}
  for trace, spec in zip(traces, config.layers.layers, strict=True):
    # Without a whole group of tokens there are no entries.
    attended = (spec.is_sparse or spec.is_source) and trace["entries"] is not None
    if spec.has_window:
      entries = trace["entries"].rows if attended else None
      found.setdefault("window_kv", []).append(
        _window(trace, batch, config, formats, spec, entries)
      )
    if spec.is_source and attended:
      found.setdefault("main_kv", []).append(_entries(trace, batch, config, formats, spec))
    if spec.has_indexer and attended:
      found.setdefault("index_k", []).append(_index(trace, batch, config, formats, spec))
  return found


def _rounded(values: jax.Array, formats: Sequence[str]) -> jax.Array:
  """As they come back from each format, [formats, ...]."""
  return jnp.stack([fake_quant(values, format) for format in formats])


def _relative(changed: jax.Array, of: jax.Array, there: jax.Array) -> jax.Array:
  """By format: root mean square of a change over that of the values, of rows that are there."""
  there = jnp.expand_dims(there, range(there.ndim, of.ndim))
  change = jnp.where(there, changed.astype(jnp.float32) - of, 0.0)
  over = tuple(range(1, changed.ndim))
  return jnp.sqrt(jnp.square(change).sum(over) / jnp.square(jnp.where(there, of, 0.0)).sum())


def _output(
  trace, batch: Batch, config: ModelConfig, spec: LayerSpec, window: Stored, entries: Stored | None
):
  """Attention [B, S, H, C] of a layer with this window and these entries."""
  q, positions, scale = trace["q"], batch.positions_BxS, config.head_dim**-0.5
  view = View(window, positions, width=config.window)
  if entries is not None and spec.is_sparse:
    rows = trace["entries"].locate(trace["ids"])
    view = dataclasses.replace(view, entries=entries, rows_BxSxK=rows)
  attended = sparse_attention(q, positions, view, trace["sink"], scale=scale)
  if entries is not None and spec.mode == "dense":
    every = dataclasses.replace(trace["entries"], rows=entries).values(q.dtype)[:, :, None]
    lo, hi = batch.span(spec.ratio)
    attended = merge(attended, dense_attention(q, every, every, lo, hi, scale=scale))
  return attended.out_BxSxHxC


def _window(
  trace, batch: Batch, config: ModelConfig, formats: Sequence[str], spec: LayerSpec, entries
):
  values = trace["window"].decode()
  rounded = _rounded(values, formats)
  output = lambda kept: _output(trace, batch, config, spec, Stored.plain(kept), entries)  # noqa: E731
  return {
    "error": _relative(rounded, values, batch.valid_BxS),
    "effect": _relative(jax.lax.map(output, rounded), output(values), batch.valid_BxS),
  }


def _entries(trace, batch: Batch, config: ModelConfig, formats: Sequence[str], spec: LayerSpec):
  values = trace["entries"].rows.decode()
  rounded = _rounded(values, formats)
  window = trace["window"]
  output = lambda kept: _output(trace, batch, config, spec, window, Stored.plain(kept))  # noqa: E731
  return {
    "error": _relative(rounded, values, _whole(values, batch, spec)),
    "effect": _relative(jax.lax.map(output, rounded), output(values), batch.valid_BxS),
  }


def _index(trace, batch: Batch, config: ModelConfig, formats: Sequence[str], spec: LayerSpec):
  (q, weights), keys = trace["index"], trace["index_keys"]
  within = trace["pool"] if spec.candidate_role == "pool" else None
  values = keys.rows.decode()

  def chosen(rounded):
    q, values = rounded
    stored = dataclasses.replace(keys, rows=Stored.plain(values))
    span = batch.span(spec.ratio)
    return select(q, stored, weights, *span, top_k=config.top_k, within=within).rows_BxSxK

  rounded_q, rounded_k = _rounded(q, formats), _rounded(values, formats)
  errors = (
    _relative(rounded_k, values, _whole(values, batch, spec)),
    _relative(rounded_q, q, batch.valid_BxS),
  )
  return {
    "error": (errors[0] + errors[1]) / 2,
    "before": chosen((q, values)),
    "after": jax.lax.map(chosen, (rounded_q, rounded_k)),
  }


def _whole(values_TxC: jax.Array, batch: Batch, spec: LayerSpec) -> jax.Array:
  """Entries [T] of the prompt's tokens: those behind them are of padding."""
  _, hi_BxS = batch.span(spec.ratio)
  return jnp.arange(len(values_TxC)) < jnp.where(batch.valid_BxS, hi_BxS, 0).max()


@dataclasses.dataclass(frozen=True)
class Change:
  """What a dial does to the predictions: means over the prompt.

  Attributes:
    per_token: bytes a token of context.
    kl: from the unrounded prediction to the rounded one, nats.
    same: share of positions whose most likely token stays.
  """

  per_token: float
  kl: float
  same: float


def logit_change(
  path: str | os.PathLike, prompt: str | Sequence[int], dials: Mapping[str, Mapping[str, str]]
) -> dict[str, Change]:
  """Predictions under numerics "kvquant" with these dials beside those under "exact".

  Args:
    path: of the model.
    dials: name -> formats of components, as `hysparse.load` takes them; {} is the config's.

  Raises:
    ConfigError: a format or a prompt that does not fit; else as `hysparse.load`.
  """
  from hysparse.analysis.table import footprint
  from hysparse.conversion.load import load

  step = jax.jit(forward, static_argnums=0, static_argnames="all_positions")

  def predicted(**options: Any) -> tuple[jax.Array, ModelConfig]:
    loaded = load(path, dequantise="f32", **options)  # the same values, and compiled sooner
    seen = prompt_of(loaded, prompt)
    batch = Batch.of(seen.padded_S[None], jnp.asarray([seen.count]), is_prompt=True)
    logits = step(seen.graphdef, seen.state, batch, all_positions=True).logits_BxNxV
    return jax.nn.log_softmax(logits[0, : seen.count]), loaded.config.model

  exact, _ = predicted(numerics="exact")
  changes = {}
  for name, formats in dials.items():
    rounded, config = predicted(numerics="kvquant", dial=dict(formats))
    kl = (jnp.exp(exact) * (exact - rounded)).sum(-1).mean()
    same = (exact.argmax(-1) == rounded.argmax(-1)).mean()
    changes[name] = Change(float(footprint(config).per_token), float(kl), float(same))
  return changes
