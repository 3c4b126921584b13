"""Views of a prompt: against hand-made numbers, other ways of computing them, and odd schedules."""

import pathlib

import numpy as np
import pytest

import hysparse
from hysparse import analysis
from hysparse.analysis import prompts
from hysparse.analysis.selected import share
from hysparse.config import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
  "d_model=32", "n_heads=2", "head_dim=16", "rope_dim=8", "q_rank=16", "o_rank=16", "window=8",
  "top_k=4", "index_heads=2", "index_dim=16", "n_experts=4", "expert_dim=16", "streams=2",
  "schedule='swa full/2 reuse | full/1+candidates reindex'",
  "vocab_size=64", "engram_dim=8", "engram_vocab=64", "candidate_block_size=2", "max_positions=512",
]  # fmt: skip
PLOTS = ("map", "overlap", "recall", "gates", "experts", "mass")
COUNT = 60
ROUNDING = 1e-5  # float32 sums of probabilities


def made(*more):
  overrides = [f"model.{field}" for field in (*SMALL, *more)] + ["data.seq_len=128"]
  config = hysparse.load_config(str(ROOT / "configs" / "tiny.py"), overrides)
  return (config, *hysparse.create(config, seed=3))


def prompt(count=COUNT, vocab=64):
  return np.random.default_rng(0).integers(0, vocab, count)


@pytest.fixture(scope="module")
def shown():
  return analysis.selection(made("candidate_blocks=6"), prompt())


def test_share():
  of = np.array([[1, 3, 5], [0, -1, -1], [-1, -1, -1], [2, 4, -1]])
  among = np.array([[3, 5, 7], [1, 2, -1], [1, 2, 3], [4, 2, 9]])
  np.testing.assert_array_equal(share(of, among), [2 / 3, 0, np.nan, 1])


def test_selections_are_of_the_past(shown):
  assert list(shown.chosen) == [1, 3, 4]
  for chosen in shown.chosen.values():
    assert chosen.ids_SxK.shape == chosen.wanted_SxK.shape == (COUNT, 4)
    for ids in (chosen.ids_SxK, chosen.wanted_SxK):
      assert (ids < np.maximum(chosen.visible_S, 0)[:, None]).all()
      counts = (ids >= 0).sum(1)
      np.testing.assert_array_equal(counts, np.minimum(chosen.visible_S, 4))
    few = chosen.visible_S <= 4
    assert (chosen.recall_S[few & (chosen.visible_S > 0)] == 1).all()  # everything is selected
  np.testing.assert_array_equal(shown.chosen[1].visible_S, (np.arange(COUNT) + 1) // 2)


@pytest.mark.slow
def test_overlap_by_counting(shown):
  overlap = shown.overlap
  np.testing.assert_allclose(np.diag(overlap), 1)
  np.testing.assert_allclose(overlap, overlap.T)
  first, second = shown.chosen[1], shown.chosen[3]
  shares = []
  for s in range(COUNT):
    if min(first.visible_S[s], second.visible_S[s]) < 16:
      continue
    a = {token for j in first.ids_SxK[s] if j >= 0 for token in (2 * j, 2 * j + 1)}
    b = {j for j in second.ids_SxK[s] if j >= 0}
    shares.append(len(a & b) / min(len(a), len(b)))
  assert shares and overlap[0, 1] == pytest.approx(np.mean(shares))

  # The pool bounds the layer inside it.
  chosen = shown.chosen[4]
  assert (chosen.pool_recall_S(chosen.ids_SxK)[chosen.visible_S > 0] == 1).all()
  inside = chosen.pool_recall_S(chosen.wanted_SxK)
  assert (chosen.recall_S <= inside + ROUNDING)[chosen.visible_S > 0].all()
  assert np.nanmin(inside) < 1
  row = shown.frame.loc[4]
  assert 0 < row["recall"] <= row["pool_recall"] <= 1 and 0 < row["own_in_pool"] <= 1
  assert np.isnan(shown.frame.loc[3, "pool_recall"])


@pytest.mark.slow
def test_experts_and_gates_and_mass(shown):
  load = shown.load
  assert load.shape == (5, 4) and (load.sum(1) == 2 * COUNT).all()
  for layer in (0, 4):
    by_hand = [(shown.experts[layer] == expert).sum() for expert in range(4)]
    np.testing.assert_array_equal(load[layer], by_hand)
  (gates,) = shown.gates.values()
  assert gates.shape == (COUNT, 2) and 0 < gates.min() < gates.max() < 1
  assert list(shown.mass) == [1, 2, 3, 4]
  for mass in shown.mass.values():
    np.testing.assert_allclose(mass.sum(1), 1, atol=ROUNDING)
    assert mass.min() > -ROUNDING
  assert abs(shown.mass[1][0, 0]) < ROUNDING  # no entry of two tokens is whole yet


@pytest.mark.slow
def test_pictures(shown):
  for name in PLOTS:
    assert getattr(shown, f"plot_{name}")()._repr_png_().startswith(b"\x89PNG")
  assert "reindex" in str(shown) and "reindex" in shown._repr_html_()


@pytest.mark.slow
def test_a_pool_of_everything_changes_nothing():
  everything = analysis.selection(made("candidate_blocks=64"), prompt())
  chosen = everything.chosen[4]
  np.testing.assert_array_equal(chosen.ids_SxK, chosen.free_SxK)
  assert everything.frame.loc[4, "pool_recall"] == everything.frame.loc[4, "own_in_pool"] == 1


@pytest.mark.slow
def test_a_dense_layer_selects_what_is_wanted():
  # With one head, the best of the heads and the sum over them are the same.
  model = made("schedule='dense/1 reuse'", "engram_layers=()", "n_heads=1", "o_groups=1")
  found = analysis.selection(model, prompt())
  assert list(found.chosen) == [0]
  assert found.frame.loc[0, "recall"] == 1
  assert found.frame.loc[0, "queries"] == COUNT - 15


@pytest.mark.slow
def test_a_schedule_that_selects_nothing():
  model = made("schedule='swa mha'", "engram_layers=()")
  found = analysis.selection(model, prompt(1))
  assert not found.chosen and not found.gates and not found.mass
  for name in PLOTS:
    assert getattr(found, f"plot_{name}")()._repr_png_()
  assert "no layer selects" in str(found)


@pytest.mark.slow
def test_the_text_of_tokens():
  loaded = hysparse.load(ROOT / "tests" / "golden" / "trained")
  text = "def f(x):\n  return x\n"
  seen = prompts.prompt_of(loaded, text)
  assert list(seen.padded_S[: seen.count]) == list(loaded.tokenizer.encode(text))
  assert len(seen.padded_S) == 256


@pytest.mark.parametrize(
  "prompt, message",
  [
    ("text", "has no tokenizer"),
    ([], r"has shape \(0,\)"),
    ([[1, 2]], r"has shape \(1, 2\)"),
    ([1] * 513, "must be 1 to 512 token ids"),
    ([1, 64], "must be in 0..63"),
    ([-1], "must be in 0..63"),
  ],
)
def test_prompts_that_do_not_fit(prompt, message):
  config = hysparse.load_config(
    str(ROOT / "configs" / "tiny.py"), [f"model.{field}" for field in SMALL] + ["data.seq_len=128"]
  )
  with pytest.raises(ConfigError, match=message):
    analysis.selection((config, None, None), prompt)  # refused before the model is looked at
