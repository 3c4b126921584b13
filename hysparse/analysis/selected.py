"""What a model does with one prompt: entries selected, how well, gates opened, experts used.

    shown = selection(hysparse.load("runs/demo"), "def main():\\n  ...")
    shown.frame                       # a line per selecting layer
    shown.plot_map(), shown.plot_overlap(), shown.plot_recall()
    shown.plot_gates(), shown.plot_experts(), shown.plot_mass()

Everything comes from one forward pass without a cache, on the device; exact, in blocks. Recall is
measured as in evaluation/recall.py: against the K entries that dense attention of the same queries
over all entries would look at most.

Source: arXiv 2609.19969, sections 2.3, 2.5 and 2.6.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.indexer import select
from hysparse_kernels.sparse_attention import View, sparse_attention

from hysparse.analysis.frames import frame, lines
from hysparse.analysis.prompts import prompt_of
from hysparse.config import Config, ModelConfig
from hysparse.evaluation.recall import VISIBLE_PER_SELECTED, oracle_rows
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Call
from hysparse.nn.model import Model

if TYPE_CHECKING:
  import pandas

  from hysparse.analysis.look import Plot
  from hysparse.conversion.load import Loaded


@dataclasses.dataclass(frozen=True)
class Chosen:
  """The selection of one layer.

  Attributes:
    layer: that selects.
    source: whose entries these are.
    ratio: tokens of an entry.
    mode: of the layer.
    ids_SxK: entries selected by each query, ascending, -1 for none.
    wanted_SxK: those that dense attention would look at most.
    visible_S: entries that each query may see.
    free_SxK: what a layer in a candidate pool would select without it; None elsewhere.
    pool_SxN: blocks of the pool that the layer selects in; None without.
    pool_block: entries in one of them.
  """

  layer: int
  source: int
  ratio: int
  mode: str
  ids_SxK: np.ndarray
  wanted_SxK: np.ndarray
  visible_S: np.ndarray
  free_SxK: np.ndarray | None = None
  pool_SxN: np.ndarray | None = None
  pool_block: int = 1

  @property
  def counted_S(self) -> np.ndarray:
    """Queries that see so many entries that choosing matters."""
    return self.visible_S >= VISIBLE_PER_SELECTED * self.ids_SxK.shape[1]

  @property
  def recall_S(self) -> np.ndarray:
    """Share of the wanted entries that were selected, of each query."""
    return share(self.wanted_SxK, self.ids_SxK)

  @property
  def random_S(self) -> np.ndarray:
    """The same of a random selection."""
    return self.ids_SxK.shape[1] / np.maximum(self.visible_S, 1)

  def pool_recall_S(self, of_SxK: np.ndarray) -> np.ndarray:
    """Share of entries [S, K] that lie in the pool's blocks."""
    blocks = np.where(of_SxK >= 0, of_SxK // self.pool_block, -1)
    return share(blocks, self.pool_SxN)


def share(of_SxK: np.ndarray, among_SxN: np.ndarray) -> np.ndarray:
  """Of each row's numbers (-1 is none), the share that the other's row holds; NaN without any."""
  rows = np.arange(len(of_SxK), dtype=np.int64)[:, None] << 32
  there = of_SxK >= 0
  found = np.isin(rows + of_SxK, (rows + among_SxN)[among_SxN >= 0]) & there
  counts = there.sum(1)
  return np.where(counts > 0, found.sum(1) / np.maximum(counts, 1), np.nan)


@dataclasses.dataclass(frozen=True)
class Selection:
  """One prompt, seen from inside.

  Attributes:
    config: the model.
    tokens_S: of the prompt.
    texts: of each token; None without a tokenizer.
    chosen: by selecting layer.
    gates: by Engram layer, how far the gate of each stream was open: [S, M], 0 to 1.
    experts: by layer, the routed experts of each token: [S, A].
    mass: by attention layer with selected entries, the share of probability (mean of the heads) on
      these entries, on the window and on the sink: [S, 3].
  """

  config: ModelConfig
  tokens_S: np.ndarray
  texts: tuple[str, ...] | None
  chosen: Mapping[int, Chosen]
  gates: Mapping[int, np.ndarray]
  experts: Mapping[int, np.ndarray]
  mass: Mapping[int, np.ndarray]

  @property
  def load(self) -> np.ndarray:
    """Tokens that each expert of each layer got, [L, E]."""
    count = self.config.n_experts
    return np.stack([np.bincount(x[x >= 0], minlength=count) for x in self.experts.values()])

  @property
  def overlap(self) -> np.ndarray:
    """Of each pair of selecting layers, the share of tokens that both selected: [n, n].

    An entry counts as the tokens it was made of, so that layers with different ratios compare; of
    the smaller selection, mean over queries that choose in both. NaN where there are none.
    """
    layers = list(self.chosen.values())
    result = np.full((len(layers), len(layers)), np.nan)
    for i, a in enumerate(layers):
      for j, b in enumerate(layers):
        counted = a.counted_S & b.counted_S
        if not counted.any():
          continue
        first, second = (_covered(x)[counted] for x in (a, b))
        sizes = [(x >= 0).sum(1) for x in (first, second)]
        both = share(first, second) * sizes[0]
        result[i, j] = (both / np.minimum(*sizes)).mean()
    return result

  @property
  def frame(self) -> pandas.DataFrame:
    """A line per selecting layer: recall, and of a pool how much of what is wanted it holds."""
    return frame(self.rows(), "layer")

  def rows(self) -> list[dict[str, Any]]:
    """The rows of `frame`."""
    rows = []
    for c in self.chosen.values():
      row = {"layer": c.layer, "mode": c.mode, "entries_of": c.source, "tokens_an_entry": c.ratio}
      row |= {"queries": int(c.counted_S.sum()), "recall": _mean(c, c.recall_S)}
      row |= {"random": _mean(c, c.random_S), "pool_recall": np.nan, "own_in_pool": np.nan}
      if c.pool_SxN is not None:
        row["pool_recall"] = _mean(c, c.pool_recall_S(c.wanted_SxK))
        row["own_in_pool"] = _mean(c, c.pool_recall_S(c.free_SxK))
      rows.append(row)
    return rows

  def __str__(self) -> str:
    return lines(self.rows(), right=range(2, 9)) if self.chosen else "no layer selects"

  __repr__ = __str__

  def _repr_html_(self) -> str:
    return self.frame.to_html(border=0, na_rep="", float_format="{:.3f}".format)

  def plot_map(self, bins: int = 96) -> Plot:
    """Which positions each selecting layer looks at, by position of the query."""
    from hysparse.analysis import selected_plots

    return selected_plots.selection_map(self, bins)

  def plot_overlap(self) -> Plot:
    """`overlap` as a matrix."""
    from hysparse.analysis import selected_plots

    return selected_plots.overlap(self)

  def plot_recall(self) -> Plot:
    """Recall of each indexer beside a random selection's, and of the candidate pool."""
    from hysparse.analysis import selected_plots

    return selected_plots.recall(self)

  def plot_gates(self, first: int = 0, count: int = 48) -> Plot:
    """How far Engram's gates open at each of some tokens."""
    from hysparse.analysis import selected_plots

    return selected_plots.gates(self, first, count)

  def plot_experts(self) -> Plot:
    """Load of every expert, 1 being an even share."""
    from hysparse.analysis import selected_plots

    return selected_plots.experts(self)

  def plot_mass(self) -> Plot:
    """Where each layer's attention goes: selected entries, window, sink."""
    from hysparse.analysis import selected_plots

    return selected_plots.mass(self)


def _mean(chosen: Chosen, values_S: np.ndarray) -> float:
  counted = chosen.counted_S & ~np.isnan(values_S)
  return float(values_S[counted].mean()) if counted.any() else float("nan")


def _covered(chosen: Chosen) -> np.ndarray:
  """Tokens [S, K r] of the selected entries, -1 for none."""
  tokens = chosen.ids_SxK[..., None] * chosen.ratio + np.arange(chosen.ratio)
  tokens = np.where(chosen.ids_SxK[..., None] >= 0, tokens, -1)
  return tokens.reshape(len(tokens), -1)


def selection(
  model: Loaded | tuple[Config, nnx.GraphDef, nnx.State], prompt: str | Sequence[int]
) -> Selection:
  """Runs a prompt and looks inside.

  Args:
    model: what `hysparse.load` returns, or (config, graphdef, state).
    prompt: token ids, or text if the model has a tokenizer.

  Raises:
    ConfigError: see `prompts.prompt_of`.
  """
  seen = prompt_of(model, prompt)
  c, count = seen.config.model, seen.count
  found = _look(seen.graphdef, seen.state, seen.padded_S, count, config=c)
  # One row, without its padding; host arrays from here on.
  found = jax.tree.map(lambda x: np.asarray(x)[0, :count], found)
  chosen = {}
  for layer, arrays in found["chosen"].items():
    spec = c.layers[layer]
    visible = (np.arange(count) + 1) // spec.ratio
    block = c.candidate_block_size if "pool_SxN" in arrays else 1
    chosen[layer] = Chosen(
      layer, spec.kv_source, spec.ratio, str(spec), visible_S=visible, pool_block=block, **arrays
    )
  tokens_S, texts = seen.padded_S[:count], None
  if seen.tokenizer is not None:
    texts = tuple(seen.tokenizer.token_text(int(i)) for i in tokens_S)
  return Selection(c, tokens_S, texts, chosen, found["gates"], found["experts"], found["mass"])


@functools.partial(jax.jit, static_argnames=("graphdef", "config"))
def _look(graphdef, state, tokens_S, count, *, config: ModelConfig) -> dict[str, Any]:
  model: Model = nnx.merge(graphdef, state)
  batch = Batch.of(tokens_S[None], jnp.asarray([count]), is_prompt=True)
  traces = model.hidden(batch, call=Call(capture=True)).aux.trace
  # Indexers, and dense layers whose best entries others read.
  read = {spec.index_source for spec in config.layers} | set(config.layers.index_sources)
  return {
    "chosen": {
      layer: _chosen(traces[layer], batch, config, layer)
      for layer in sorted(read - {None})
      if traces[layer]["ids"] is not None
    },
    "gates": {layer: traces[layer]["engram_gates"] for layer in config.engram_layers},
    "experts": {layer: trace["experts"] for layer, trace in enumerate(traces)},
    "mass": {
      layer: _mass(traces[layer], batch, config)
      for layer, spec in enumerate(config.layers)
      if spec.is_sparse and traces[layer]["ids"] is not None
    },
  }


def _chosen(trace: Mapping[str, Any], batch: Batch, config: ModelConfig, layer: int):
  ratio = config.layers[layer].ratio
  arrays = {"ids_SxK": trace["ids"], "wanted_SxK": oracle_rows(trace, batch, config, ratio)}
  if config.layers[layer].candidate_role == "pool":
    q_BxSxIxD, weights_BxSxI = trace["index"]
    free = select(
      q_BxSxIxD, trace["index_keys"], weights_BxSxI, *batch.span(ratio), top_k=config.top_k
    )
    arrays |= {"free_SxK": free.rows_BxSxK, "pool_SxN": trace["pool"].blocks_BxSxN}
  return arrays


def _mass(trace: Mapping[str, Any], batch: Batch, config: ModelConfig):
  entries, ids_BxSxK = trace["entries"], trace["ids"]
  view = View(
    trace["window"], batch.positions_BxS, entries.rows, entries.locate(ids_BxSxK), config.window
  )
  scale = config.head_dim**-0.5
  attended = sparse_attention(trace["q"], batch.positions_BxS, view, trace["sink"], scale=scale)
  selected_BxS = attended.mass_BxSxK.sum(-1) / config.n_heads
  sink_BxS = jnp.exp(trace["sink"] - attended.lse_BxSxH).mean(-1)
  return jnp.stack([selected_BxS, 1 - selected_BxS - sink_BxS, sink_BxS], -1)
