"""The table of released tensors: the published totals, the golden folders, the model's state."""

import collections
import dataclasses
import time

import pytest
import released_folders as folders

from hysparse import checkpoints, published
from hysparse.config import ConfigError
from hysparse.conversion import load
from hysparse.conversion.tensors import leaves, tensors
from hysparse.nn.model import abstract

# Of the release: tensors and bytes by dtype.
PUBLISHED = {
  "I8": (47_232, 278_585_671_680),
  "F8_E4M3": (357, 204_015_223_296),
  "F8_E8M0": (47_589, 23_563_015_184),
  "BF16": (520, 3_952_883_712),
  "F32": (387, 169_229_128),
}
SECONDS = 2.0  # a quarter of one here


def model(case: str):
  path = folders.GOLDEN / case / "config.json"
  return published.read(str(folders.RELEASED_CONFIG if case == "released" else path))


def test_the_release_has_the_published_totals():
  config = model("released")
  start = time.perf_counter()
  table = list(tensors(config))
  assert time.perf_counter() - start < SECONDS
  counts, sizes = collections.Counter(), collections.Counter()
  for tensor in table:
    counts[tensor.dtype] += 1
    sizes[tensor.dtype] += tensor.nbytes
  assert {dtype: (counts[dtype], sizes[dtype]) for dtype in counts} == PUBLISHED
  assert len({tensor.name for tensor in table}) == len(table) == 96_085
  assert sum(sizes.values()) == 510_286_023_000


@pytest.mark.parametrize("case", folders.CASES)
def test_the_golden_folders_hold_exactly_the_table(case):
  stored = folders.read_folder(folders.GOLDEN / case)
  assert {t.name: (t.dtype, list(t.shape), t.nbytes) for t in tensors(model(case))} == {
    name: (dtype, shape, len(data)) for name, (dtype, shape, data) in stored.items()
  }


@pytest.mark.parametrize("case", ["released", *folders.CASES])
def test_every_array_of_the_model_is_covered_once_with_its_shape(case):
  config = model(case)
  wanted = {
    name: like.shape
    for name, like in checkpoints.named(abstract(load.experiment_of(config))[1]).items()
    if name != "token_map"
  }
  table = list(leaves(config))
  assert {leaf.path: leaf.model_shape for leaf in table} == wanted
  assert len(table) == len(wanted)


def test_the_tensors_of_a_stack_are_listed_with_their_places():
  experts = next(
    leaf
    for leaf in leaves(model("released"))
    if leaf.names[0] == "layers.8.ffn.experts.0.w2.weight"
  )
  assert (experts.stack, experts.shape, experts.model_shape) == (
    (1, 384),
    (5120, 2304),
    (1, 384, 2304, 5120),
  )
  places = {t.name: (t.index, t.part, t.shape, t.dtype) for t in experts.tensors()}
  assert places["layers.8.ffn.experts.17.w2.scale"] == ((0, 17), "scales", (5120, 72), "F8_E8M0")
  assert places["layers.8.ffn.experts.17.w2.weight"] == ((0, 17), "codes", (5120, 1152), "I8")
  assert len(places) == 2 * 384


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"residual": "two_pass"}, "residual"),
    ({"residual": "plain", "streams": 1}, "residual"),
    ({"schedule": "swa mha", "engram_layers": (), "draft_target_layers": (0,)}, "layer 1: 'mha'"),
    ({"d_model": 250}, "model.d_model: is 250; .* a multiple of 32"),
    ({"expert_dim": 100}, "model.expert_dim: is 100; .* a multiple of 32"),
    ({"engram_dim": 20}, "model.engram_dim: is 20; .* a multiple of 32"),
  ],
)
def test_what_the_layout_cannot_hold_is_refused_by_name(change, message):
  with pytest.raises(ConfigError, match=message) as caught:
    list(tensors(dataclasses.replace(model("tiny-text"), **change)))
  assert "\n" not in str(caught.value)
