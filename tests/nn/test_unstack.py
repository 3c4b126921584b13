"""Layers with arrays of their own: the numbers of the stacked model, on every kind of leaf."""

import pathlib

import jax
import numpy as np
import pytest
import small
from flax import nnx
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import Separate

import hysparse
from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch
from hysparse.nn.host_table import HostTable
from hysparse.nn.unstack import unstack

# Float32 logits of the same function: a scanned layer adds in another order than an unrolled one.
LOGIT_TOLERANCE = 2e-5
# Runs of two and three layers beside single ones; Engram stands in a run of its own.
CFG = small.config(
  "swa*2 full/2 reuse*2 | full/1 reuse*2", residual="plain", engram_layers=(5,), vocab_size=16
)
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "tiny-text"


@pytest.fixture(scope="module", params=["device", "host"])
def golden(request) -> hysparse.Loaded:
  """A model whose weights are quantised, its Engram tables on the device or on the host."""
  return hysparse.load(GOLDEN, engram=request.param)


def check_leaves(config, graphdef, state) -> dict[str, object]:
  """Every leaf is the one of its layer, bit for bit; the single leaves by name."""
  apart = unstack(graphdef, state)
  old = dict(nnx.to_flat_state(state))
  firsts = [first for first, _ in config.layers.runs()]
  seen, values = set(), {}
  for path, leaf in nnx.to_flat_state(apart[1]):
    values["/".join(map(str, path))] = new = leaf.get_raw_value()
    source = path if path[0] != "runs" else (*path[:2], *path[3:])
    was = old[source].get_raw_value()
    seen.add(source)
    assert type(leaf) is type(old[source]) and type(new) is type(was)
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(was), strict=True)
    for part, stacked in pairs:
      want = stacked if path[0] != "runs" else stacked[path[2]]
      assert part.dtype == want.dtype
      np.testing.assert_array_equal(part, want, err_msg=str(path))
    if isinstance(was, HostTable):
      assert new is was
  assert seen == old.keys()
  layers = {(path[1], path[2]) for path, _ in nnx.to_flat_state(apart[1]) if path[0] == "runs"}
  assert len(layers) == len(config.layers) and {run for run, _ in layers} == set(range(len(firsts)))
  return values


def check_calls(config, graphdef, state, calls, **options) -> None:
  """The same logits of calls of some tokens each, with a cache; none: of one without."""
  models = (graphdef, state), unstack(graphdef, state, **options)
  tokens, at = small.tokens(config, 2, 24), 0
  caches = [allocate(config, 2, 24) if calls else None for _ in models]
  for n in calls or (24,):
    batch = Batch.of(tokens[:, at : at + n])
    want, found = outputs = [
      small.compiled(*model, batch, cache, all_positions=True)
      for model, cache in zip(models, caches, strict=True)
    ]
    caches, at = [output.cache for output in outputs], at + n
    assert np.isfinite(want.logits_BxNxV).all()
    error = np.abs(found.logits_BxNxV - want.logits_BxNxV).max()
    assert error <= LOGIT_TOLERANCE * np.abs(want.logits_BxNxV).max()
  for cache in caches:
    assert cache is None or cache.check() is None


def test_every_leaf_is_that_of_its_layer():
  assert max(count for _, count in CFG.model.layers.runs()) == 2
  check_leaves(CFG.model, *small.model(CFG))


# Every day engines (unstacked) are compared with the stacked model: tests/inference/test_engine.py.
@pytest.mark.slow
@pytest.mark.parametrize(
  "schedule, calls",
  [
    ("swa*2 full/1", ()),
    ("swa*2 full/1", (8, 8, 8)),
    ("swa full/2 reuse*2", (8, 8, 8)),
  ],
)
def test_the_same_logits(schedule, calls):
  cfg = small.config(schedule, residual="plain", vocab_size=16)
  check_calls(cfg, *small.model(cfg), calls)


@pytest.mark.parametrize("calls", [(), pytest.param((8, 8, 8), marks=pytest.mark.slow)])
def test_experts_may_get_arrays_of_their_own(calls):
  cfg = small.config("swa full/2", residual="plain", vocab_size=16)
  graphdef, state = small.model(cfg)
  old = dict(nnx.to_flat_state(state))
  seen = 0
  for path, leaf in nnx.to_flat_state(unstack(graphdef, state, separate_experts=True)[1]):
    value = leaf.get_raw_value()
    assert isinstance(value, Separate) == ("experts" in path)
    if "experts" in path:
      stacked = old[(*path[:2], *path[3:])].get_raw_value()
      np.testing.assert_array_equal(value.stacked(), stacked[path[2]])
      seen += 1
  assert seen == 3 * len(cfg.model.layers)
  check_calls(cfg, graphdef, state, calls, separate_experts=True)


def test_quantised_experts_stay_together(golden):
  graphdef, state = golden.graphdef, golden.state
  apart = unstack(graphdef, state, separate_experts=True)
  want = unstack(graphdef, state)
  assert jax.tree.structure(apart[1]) == jax.tree.structure(want[1])


def test_the_old_arrays_stay():
  graphdef, state = small.model(CFG)
  before = jax.tree.map(np.array, state)
  unstack(graphdef, state)
  jax.tree.map(np.testing.assert_array_equal, state, before)


def test_once_apart_it_stays_as_it_is():
  apart = unstack(*small.model(CFG))
  again = unstack(*apart)
  assert again[0] == apart[0]
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again[1], apart[1])), strict=True))


def test_one_graph_for_all_weights():
  assert unstack(*small.model(CFG))[0] is unstack(*small.model(CFG, 1))[0], "compiled once"


def test_quantised_leaves_and_host_tables(golden):
  values = check_leaves(golden.config.model, golden.graphdef, golden.state)
  kinds = {type(value) for value in values.values()}
  assert Quantised in kinds
  tables = {type(value) for name, value in values.items() if name.endswith("engram/table")}
  assert len(tables) == 1 and tables < {Quantised, HostTable}


@pytest.mark.slow
def test_the_same_logits_of_quantised_leaves_and_host_tables():
  loaded = hysparse.load(GOLDEN, engram="host")
  check_calls(loaded.config, loaded.graphdef, loaded.state, (12, 12))
