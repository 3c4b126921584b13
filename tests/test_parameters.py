"""The weight table against the released checkpoint's totals and the modules themselves."""

import dataclasses
import math
import pathlib
import time

import jax
import pytest
from flax import nnx

from hysparse import config_file
from hysparse.config import ConfigError
from hysparse.nn import moe
from hysparse.nn.model import abstract
from hysparse.parameters import (
  active_parameters,
  backbone_parameters,
  draft_weights,
  engram_rows,
  parameters,
  vision_weights,
  weights,
)

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def model(name):
  return config_file.load(str(CONFIGS / f"{name}.py")).model


@pytest.fixture(scope="module")
def released():
  return model("v41_flash")


def test_the_released_counts(released):
  counts = parameters(released)
  assert counts["experts"] == 40 * 385 * 3 * 5120 * 2304 == 544_997_376_000
  assert counts["engram_tables"] == 196_613_849_600
  assert round(backbone_parameters(released) / 1e9) == 552
  assert round(counts["drafts"] / 1e9) == 14


def test_the_released_active_counts(released):
  active = active_parameters(released)
  assert round(active["decode"] / 1e9) == 16
  assert round(active["prefill"] / 1e9) == 8


# Elements of the released checkpoint by stored type: the bytes that its index publishes, over the
# bytes of an element (two E2M1 codes a byte).
PUBLISHED = {"fp4": 2 * 278_585_671_680, "fp8": 204_015_223_296, "bf16": 3_952_883_712 // 2,
             "f32": 169_229_128 // 4}  # fmt: skip
TILED = {"wq_a", "wq_b", "wo_a", "wo_b", "main_proj", "table"}


def stored_type(weight):
  if weight.part == "vision":
    return "bf16"
  if weight.name in ("w1", "w2", "w3"):
    return "fp4"
  latent = weight.name == "wkv" and weight.part != "compressor"
  if weight.name in TILED or weight.name.startswith("shared_") or latent:
    return "fp8"
  if weight.part in ("streams", "balance_bias") or weight.name == "sink":
    return "f32"
  return "bf16"


def test_every_element_of_the_released_checkpoint_is_accounted_for(released):
  totals = dict.fromkeys(PUBLISHED, 0)
  for weight in (*weights(released), *draft_weights(released), *vision_weights(released)):
    totals[stored_type(weight)] += weight.size
  assert totals == PUBLISHED
  assert sum(parameters(released).values()) == sum(PUBLISHED.values())


def test_vision_counts_once_and_reaches_no_text_token(released):
  blind = dataclasses.replace(released, vision_layers=0)
  biases = 40 * 384 + 3 * 128  # a second one in every router, the draft layers included
  seen, unseen = parameters(released), parameters(blind)
  assert sum(seen.values()) - sum(unseen.values()) == seen["vision"] + biases
  assert active_parameters(released) == active_parameters(blind)


def is_prime(n):
  return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@pytest.mark.parametrize("vocab, heads, max_ngram", [(100, 2, 4), (1, 3, 2), (997, 1, 3)])
def test_engram_tables_are_successive_primes(vocab, heads, max_ngram):
  config = dataclasses.replace(
    model("tiny"), engram_layers=(1, 3), engram_vocab=vocab, engram_heads=heads,
    engram_max_ngram=max_ngram,
  )  # fmt: skip
  each = (max_ngram - 1) * heads
  primes = [n for n in range(vocab, vocab + 400) if is_prime(n)]
  assert engram_rows(config) == (sum(primes[:each]), sum(primes[each : 2 * each]))


def test_released_engram_rows(released):
  assert engram_rows(released) == (384_006_168, 384_016_682)


def test_tables_that_the_hash_cannot_address_are_refused():
  config = dataclasses.replace(model("tiny"), engram_vocab=2**24)
  with pytest.raises(ConfigError, match=r"model\.engram_vocab: is 16777216; must be in"):
    parameters(config)


def test_small_fits_its_promise():
  assert 100e6 < sum(parameters(model("small")).values()) < 200e6


def test_fewer_experts_for_prompt_tokens_count_in_prefill_only():
  config = model("tiny")
  fewer = dataclasses.replace(config, experts_per_prompt_token=1)
  before, after = active_parameters(config), active_parameters(fewer)
  assert after["decode"] == before["decode"]
  encoder_layers = config.layers.decoder_start
  spared = encoder_layers * 3 * config.d_model * config.expert_dim
  assert before["prefill"] - after["prefill"] == spared


def test_prefill_needs_all_layers_where_the_decoder_cannot_be_replayed():
  config = dataclasses.replace(model("tiny"), schedule="swa full/2 reuse*6")
  active = active_parameters(config)
  head_and_norm = config.vocab_size * config.d_model + config.d_model
  assert active["decode"] - active["prefill"] == head_and_norm


MODES = "swa full/4 dense/2 reindex mha gqa/2 full/1+candidates reindex"


DRAFTS = {"draft_layers": 2, "draft_markov_rank": 3, "draft_target_layers": (1, 5)}
VISION = {"vision_layers": 2, "vision_dim": 16, "vision_heads": 2, "vision_ffn_dim": 6,
          "vision_patch": 2}  # fmt: skip


def untrained(config):
  """Router biases, of the draft layers too."""
  every = (*weights(config), *draft_weights(config))
  return sum(weight.size for weight in every if weight.part == "balance_bias")


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {**DRAFTS, **VISION, "draft_experts": 3},
    {"schedule": MODES, "residual": "two_pass"},
    {"schedule": MODES, "residual": "plain", "streams": 1, "shared_experts": 0},
  ],
)
def test_the_table_is_what_the_modules_hold(changes):
  config = config_file.load(str(CONFIGS / "tiny.py"))
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
  _, state = abstract(config)

  def held(kind):
    return sum(x.size for x in jax.tree.leaves(nnx.filter_state(state, kind)))

  assert held(moe.RouterBias) == untrained(config.model)
  assert held(nnx.Param) == sum(parameters(config.model).values()) - untrained(config.model)


def test_the_released_model_can_be_described_without_memory():
  config = config_file.load(str(CONFIGS / "v41_flash.py"))
  began = time.perf_counter()
  _, state = abstract(config)
  seconds = time.perf_counter() - began
  trained = sum(x.size for x in jax.tree.leaves(nnx.split_state(state, nnx.Param, ...)[0]))
  assert trained == sum(parameters(config.model).values()) - untrained(config.model)
  assert seconds < 60  # seconds; a layer that is built for real takes minutes
