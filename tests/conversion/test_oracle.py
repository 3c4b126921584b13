"""A second statement of the model in NumPy: right by the golden cases, then a judge of random ones.

The golden cases have one schedule and one set of sizes. The random ones have others, with expected
outputs from tests/oracle, and go through the same comparison as a case on disk.
"""

import dataclasses
import functools
import pathlib

import cases
import independent_reader
import numpy as np
import numpy_case
import pytest
from numpy_model import NumpyModel

import hysparse
from hysparse.conversion import parity, parity_case

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Both are float64; what is stored is rounded to float32, and residuals reach 16.
STORED_ROUNDING = 2e-6
CACHED = ("window_kv", "compressed_kv", "index_k")
LISTS = ("topk", "decode_topk", "experts")


@functools.cache
def golden(name: str) -> parity_case.Case:
  return parity_case.read(GOLDEN / name)


def numpy_model(folder: pathlib.Path, mode: str) -> NumpyModel:
  token_map = np.load(folder / "engram_token_map.npy")
  return NumpyModel(independent_reader.Folder(folder), token_map, quantised=mode == "kvquant")


def assert_same(name: str, mine: np.ndarray, stored: np.ndarray) -> None:
  what = name.rsplit("/", 1)[-1]
  if what == "window_kv":  # of a short prompt, the case keeps the slots that were written
    mine = mine[:, : stored.shape[1]]
  assert mine.shape == stored.shape, name
  if what in LISTS:
    np.testing.assert_array_equal(np.sort(mine, -1), np.sort(stored, -1), name)
  elif what == "expert_weights":
    np.testing.assert_allclose(np.sort(mine, -1), np.sort(stored, -1), atol=STORED_ROUNDING)
  elif stored.dtype != np.float32:
    np.testing.assert_array_equal(mine, stored, name)
  elif name.startswith("kvquant") and what in CACHED:
    np.testing.assert_array_equal(mine.astype(np.float32), stored, name)
  else:
    np.testing.assert_allclose(mine, stored, rtol=0, atol=STORED_ROUNDING, err_msg=name)


def in_mode(mode: str, stored: dict) -> list[str]:
  """Arrays of a mode, and those that have none, which there is something to compare with."""
  return [
    name
    for name in stored
    if parity_case.not_comparable(name) is None
    and (name.startswith(f"{mode}/") or name.split("/", 1)[0] not in parity_case.MODES)
  ]


@pytest.mark.parametrize(
  ("name", "mode"),
  [
    ("tiny-vision", "exact"),
    pytest.param("tiny-text", "kvquant", marks=pytest.mark.slow),
    pytest.param("tiny-text", "exact", marks=pytest.mark.slow),
    pytest.param("tiny-vision", "kvquant", marks=pytest.mark.slow),
  ],
)
def test_numpy_model_gives_what_the_published_code_gave(name, mode):
  case = golden(name)
  model = numpy_model(GOLDEN / name, mode)
  mine = {
    "engram/primes": np.array(model.primes),
    "engram/offsets": np.array(model.offsets),
    "engram/multipliers": np.array(model.multipliers),
  }
  for run in case.runs:
    found, _ = numpy_case.run_arrays(model, run.name, run.prompt, run.steps, case.expected)
    hashed = f"{run.name}/engram_hash_ids"
    mine |= {key if key == hashed else f"{mode}/{key}": value for key, value in found.items()}
  for array in in_mode(mode, case.expected):
    assert_same(array, mine[array], case.expected[array])


@pytest.mark.parametrize("mode", ["exact", "kvquant"])
def test_numpy_layers_give_what_the_published_layers_gave(mode):
  case = golden("tiny-text")
  run = case.runs[0]
  model = numpy_model(GOLDEN / "tiny-text", mode)
  found = numpy_case.layer_arrays(model, run.prompt, case.expected, case.layers)
  names = [name for name in in_mode(mode, case.layers) if name.startswith(mode)]
  assert len(names) > 15
  for name in names:
    mine, stored = found[name.removeprefix(f"{mode}/")], case.layers[name]
    if len(stored) != len(mine):
      mine = mine[case.expected[f"{run.name}/resid_positions"]]
    assert_same(name, mine, stored)


# Every mechanism at least once, in places and sizes that the golden cases do not have.
RANDOM = {
  # A source first, sources in a row, ratios that leave groups open, prompts shorter than a ratio.
  "sources": (
    1,
    {
      "modes": ["full", "full", "full", "reuse"],
      "ratios": [5, 1, 3],
      "candidates": -1,
      "engram": [],
      "drafts": 0,
      "vision": False,
      "yarn": False,
      "prompts": (23, 2),
      "hc_mult": 6,
      "sliding_window": 1,
      "index_topk": 1,
      "scoring_func": "softmax",
      "norm_topk_prob": False,
      "n_routed_experts": 6,
      "num_experts_per_tok": 3,
      "gate_temp": 2.0,
    },
  ),
  # Two selectors inside small pools, a clamp that bites, tables out of order, drafts of one token.
  "candidates": (
    2,
    {
      "modes": ["full", "reindex", "reuse", "reindex"],
      "ratios": [2],
      "candidates": 0,
      "engram": [3, 0],
      "drafts": 2,
      "vision": False,
      "yarn": True,
      "prompts": (37, 1),
      "hc_mult": 2,
      "hc_sinkhorn_iters": 2,
      "index_topk": 3,
      "candidate_topk_blocks": 3,
      "candidate_block_size": 2,
      "scoring_func": "sigmoid",
      "swiglu_limit": 0.3,
      "engram_max_ngram_size": 5,
      "dspark_block_size": 1,
      "dspark_target_layer_ids": [3, 0, 2],
    },
  ),
  # Windows only, one stream, one expert, long draft blocks, several images in a row.
  "windows": (
    3,
    {
      "modes": ["swa", "swa"],
      "engram": [1],
      "drafts": 3,
      "vision": True,
      "prompts": (45, 3),
      "hc_mult": 1,
      "hc_sinkhorn_iters": 1,
      "sliding_window": 5,
      "n_routed_experts": 4,
      "num_experts_per_tok": 1,
      "swiglu_limit": 0.0,
      "engram_max_ngram_size": 2,
      "dspark_block_size": 5,
      "dspark_target_layer_ids": [1],
    },
  ),
  # Candidates from a layer that owns no entries; images beside a global branch.
  "reindexed": (
    4,
    {
      "modes": ["full", "reindex", "swa", "reindex"],
      "ratios": [4],
      "candidates": 1,
      "engram": [2],
      "drafts": 1,
      "vision": True,
      "yarn": True,
      "prompts": (41, 3),
      "hc_mult": 3,
      "sliding_window": 20,
      "index_topk": 2,
      "candidate_topk_blocks": 2,
      "candidate_block_size": 2,
      "scoring_func": "sqrtsoftplus",
      "engram_max_ngram_size": 3,
    },
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_random_model(name, tmp_path):
  seed, features = RANDOM[name]
  cases.make(tmp_path, seed, features)
  case, loaded = parity_case.read(tmp_path), hysparse.load(tmp_path)
  model = loaded.config.model
  whole = parity.run_all(loaded.config, loaded.state, case, ["exact"])
  layers = parity.run_layers(loaded.config, loaded.state, case, ["kvquant"])
  ended = dataclasses.replace(case, layers={})
  reports = (
    parity.compare(model, ended, parity.Outputs(whole, {}), ["exact"]),
    # End to end, one flipped rounding moves all behind it: one layer at a time is the strict test.
    parity.compare(
      model, dataclasses.replace(case, expected={}), parity.Outputs({}, layers), ["kvquant"]
    ),
  )
  bad = [line for r in reports for line in r.lines() if line.startswith(("FAIL", "MISS"))]
  assert all(report.ok for report in reports), "\n".join(bad)
