"""Indexer recall against a NumPy count, and held-out bits against a model that knows nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from hysparse.evaluation.heldout import bits_per_byte
from hysparse.evaluation.recall import VISIBLE_PER_SELECTED, indexer_recall
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Call

# Float32 logarithms summed over some hundred tokens.
BITS_TOLERANCE = 1e-5


def batch(cfg):
  """Two rows: one document, and two of which the second is padding from its middle on."""
  whole = Batch.of(small.tokens(cfg, 2, 48))
  positions = whole.positions_BxS.at[1, 24:].set(jnp.arange(24))
  valid = whole.valid_BxS.at[1, 36:].set(False)
  return dataclasses.replace(whole, positions_BxS=positions, valid_BxS=valid)


@pytest.mark.parametrize(
  "schedule",
  [
    "full/1+candidates reindex",
    *(pytest.param(s, marks=pytest.mark.slow) for s in ("full/2 reuse", "dense/1 reindex")),
  ],
)
def test_recall_counts_the_entries_with_most_mass(schedule):
  cfg = small.config(schedule, candidate_blocks=4)
  graphdef, state = small.model(cfg)
  inputs = batch(cfg)
  found = indexer_recall(graphdef, state, [small.arrays(inputs)], cfg.model)
  assert set(found) == set(cfg.model.layers.index_sources)

  told = jax.jit(lambda s: nnx.merge(graphdef, s).hidden(inputs, call=Call(capture=True)).aux)(
    state
  )
  K, W = cfg.model.top_k, cfg.model.window
  for layer, result in found.items():
    ratio = cfg.model.layers[layer].ratio
    seen = told.trace[layer]
    trace = {"window": seen["window"].decode(), "entries": seen["entries"].values(jnp.float32)}
    trace = {k: np.asarray(x, np.float64) for k, x in ({"q": seen["q"]} | trace).items()}
    sink, rows = (np.asarray(seen[k]) for k in ("sink", "ids"))
    lo, hi = (np.asarray(x) for x in inputs.span(ratio))
    shares, randoms = [], []
    for b, s in np.ndindex(lo.shape):
      visible = hi[b, s] - lo[b, s]
      if not inputs.valid_BxS[b, s] or visible < VISIBLE_PER_SELECTED * K:
        continue
      first = max(s - W + 1, s - int(inputs.positions_BxS[b, s]))
      keys = [trace["window"][b, first : s + 1], trace["entries"][b, lo[b, s] : hi[b, s]]]
      keys = np.concatenate(keys)
      weight = np.exp(trace["q"][b, s] @ keys.T * cfg.model.head_dim**-0.5)
      share = weight / (weight.sum(-1, keepdims=True) + np.exp(sink)[:, None])
      mass = share.sum(0)[s + 1 - first :]
      best = lo[b, s] + np.argsort(-mass)[:K]
      shares.append(len(set(best) & set(rows[b, s])) / K)
      randoms.append(K / visible)
    assert result["queries"] == len(shares) > 10
    assert result["recall"] == pytest.approx(np.mean(shares), abs=1e-6)
    assert result["random"] == pytest.approx(np.mean(randoms), abs=1e-6)
    assert 0 < result["recall"] < 1


def test_a_model_that_knows_nothing_needs_the_bits_of_the_vocabulary():
  cfg = small.config("swa")
  graphdef, state = small.model(cfg)
  state = jax.tree.map(lambda x: x, state)
  state["head"]["weight"] = state["head"]["weight"].replace(jnp.zeros((64, 32)))
  arrays = {k: np.asarray(v) for k, v in small.arrays(batch(cfg)).items()}
  lengths = np.arange(64) % 5
  got = bits_per_byte(graphdef, state, [arrays, arrays], lengths, loss_block=10)
  counted = arrays["targets"][arrays["mask"]]
  assert got["tokens"] == 2 * len(counted) and got["bytes"] == 2 * lengths[counted].sum()
  assert got["bits_per_token"] == pytest.approx(6, abs=BITS_TOLERANCE)
  want = 6 * len(counted) / lengths[counted].sum()
  assert got["bits_per_byte"] == pytest.approx(want, rel=BITS_TOLERANCE)
