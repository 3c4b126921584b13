"""Allocated arrays have the bytes that the layout counts, component by component."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from paged_calls import CFG, DRAFTS, SEQUENCES, WIDTH, call, fresh, reserved

from hysparse import config_file
from hysparse.cache.allocate import allocate
from hysparse.cache.blocks import BlockPool
from hysparse.cache.layout import Precision, kept_tokens, layout
from hysparse.cache.measure import held_bytes
from hysparse.nn.batch import Batch
from hysparse.nn.model import abstract, forward

RELEASED = pathlib.Path(__file__).parents[2] / "configs" / "v41_flash.py"
KVQUANT = {"numerics": "kvquant"}
MODELS = {
  "exact": small.config(engram_layers=(1,), **DRAFTS),
  "packed": small.config(engram_layers=(1,), train=KVQUANT, **DRAFTS),
  # Other formats, odd widths, two sources and a scanned run.
  "dial": small.config(
    "swa*3 full/3 reuse*2 full/1",
    window=5,
    head_dim=18,
    index_dim=10,
    main_kv="mxfp4",
    index_k="fp8",
    window_kv="bf16",
    train=KVQUANT,
  ),
  "plain": small.config("mha gqa/2*2 dense/2 reuse", train=KVQUANT),
  "plain exact": small.config("mha gqa/2*2 dense/2 reuse"),
}
models = pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)


def described(cfg, cache, call_tokens=1):
  precision = Precision.of(cfg.model, cfg.train.numerics)
  return layout(cfg.model, precision, block_tokens=cache.pages.tokens, call_tokens=call_tokens)


def by_name(layout, lifetime, tokens):
  """Bytes of one sequence."""
  counted = {}
  for component in layout.of(lifetime):
    counted[component.name] = counted.get(component.name, 0) + component.bytes_at(tokens)
  return counted


def of_length(cache, lengths):
  return dataclasses.replace(cache, length_B=jnp.asarray(lengths, jnp.int32))


@models
def test_what_does_not_grow_has_the_bytes_of_the_layout(cfg):
  batch, tokens = 3, 48
  cache = allocate(cfg, batch, tokens, block_tokens=cfg.model.alignment)
  layout = described(cfg, cache)
  held = held_bytes(of_length(cache, [0, 5, 48]), cfg.model)
  for lifetime in ("bounded", "bookkeeping"):
    for name, count in by_name(layout, lifetime, tokens).items():
      assert held[name] == batch * count, name
  assert set(held) == {c.name for c in layout if c.lifetime != "scratch"}


@models
def test_entries_have_the_bytes_of_the_layout_in_whole_blocks(cfg):
  P = cfg.model.alignment
  cache = allocate(cfg, 3, 48, pool_tokens=100, block_tokens=P)
  pool = BlockPool(cache)
  layout = described(cfg, cache)
  rng = np.random.default_rng(0)
  for lengths in ([0, 0, 0], [P, 0, 2 * P], *rng.integers(0, 33, (4, 3)).tolist()):
    for slot in range(3):
      pool.release(slot)
      pool.reserve(slot, 32)  # more than it holds tokens
    held = held_bytes(of_length(pool.install(cache), lengths), cfg.model)
    whole = [-(-n // P) * P for n in lengths]
    for name in by_name(layout, "global", 0):
      least, most = (sum(by_name(layout, "global", n)[name] for n in x) for x in (lengths, whole))
      assert least <= held[name] == most, name


def test_shared_blocks_count_once():
  cfg = MODELS["packed"]
  P = cfg.model.alignment
  cache = allocate(cfg, 3, 48, pool_tokens=100, block_tokens=P)
  pool = BlockPool(cache)
  pool.reserve(0, 5 * P)
  pool.share(0, 1, 3 * P + 1)
  pool.share(0, 2, 2 * P)
  layout = described(cfg, cache)
  lengths = [5 * P, 3 * P + 1, 2 * P]
  held = held_bytes(of_length(pool.install(cache), lengths), cfg.model)
  assert pool.live() == 6
  for name, count in by_name(layout, "global", 6 * P).items():
    assert held[name] == count, name


def test_what_waits_for_the_end_of_a_call_has_the_bytes_of_the_layout():
  cache, pool = fresh()
  cache = reserved(cache, pool, [4, 4, 4])
  output = call(cache, np.zeros((SEQUENCES, WIDTH)), [4, 1, 0], defer=True)
  layout = described(CFG, cache, call_tokens=WIDTH)
  held = held_bytes(output.cache, CFG.model, output.pending)
  counted = by_name(layout, "scratch", 0)
  assert set(counted) == {"call_keys", "call_groups", "call_tokens"}
  for name, count in counted.items():
    assert held[name] == SEQUENCES * count, name


def pending_of(cfg, batch, tokens):
  """(cache, pending) of a deferred call, in zeros; nothing is compiled."""
  graphdef, state = abstract(cfg)
  cache = allocate(cfg, batch, 128)
  tokens = Batch.of(jnp.zeros((batch, tokens), jnp.int32))
  made = jax.eval_shape(functools.partial(forward, graphdef, defer=True), state, tokens, cache)
  return cache, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made.pending)


@pytest.mark.parametrize("name", ["exact", "dial", "plain"])
@pytest.mark.slow
def test_deferred_calls_of_every_schedule_keep_what_the_layout_says(name):
  cfg, batch = MODELS[name], 2
  tokens = kept_tokens(cfg.model)
  cache, pending = pending_of(cfg, batch, tokens)
  layout = described(cfg, cache, call_tokens=tokens)
  held = held_bytes(cache, cfg.model, pending)
  for component in layout.of("scratch"):
    assert component.rows == tokens
  for name, count in by_name(layout, "scratch", 0).items():
    assert held[name] == batch * count, name


@functools.cache
def released():
  """The released cache geometry; what the cache does not depend on is narrow."""
  cfg = config_file.load(str(RELEASED))
  narrow = {
    "vocab_size": 512,
    "d_model": 16,
    "n_heads": 8,
    "q_rank": 16,
    "o_rank": 8,
    "index_heads": 2,
    "n_experts": 4,
    "experts_per_token": 2,
    "expert_dim": 16,
    "engram_vocab": 100,
    "engram_dim": 4,
    "engram_compressed_vocab": 0,
    "draft_experts": 4,
    "draft_markov_rank": 8,
    "draft_noise_id": 5,
    "vision_layers": 0,
    "image_token_id": -1,
  }
  model = dataclasses.replace(cfg.model, **narrow)
  train = dataclasses.replace(cfg.train, numerics="kvquant")
  return dataclasses.replace(cfg, model=model, train=train)


@pytest.mark.parametrize("tokens", [65_536, 65_001])
def test_the_released_model_holds_890_bytes_a_token(tokens):
  cfg = released()
  cache = allocate(cfg, 1, 65_536)
  layout = described(cfg, cache)
  held = held_bytes(of_length(cache, [tokens]), cfg.model)
  assert held["main_kv"] + held["index_keys"] == pytest.approx(890 * tokens, rel=0.01)
  if tokens % layout.block_tokens == 0:
    assert held["main_kv"] + held["index_keys"] == 890 * tokens
  bounded = {
    "window_encoder": 20 * 128 * 528,
    "window_decoder": 20 * 128 * 528,
    "window_draft": 3 * 128 * 528,
    "partial_group": 3 * 2 * 512 * 4,
    "engram_history": 3 * 4,
  }
  assert {name: held[name] for name in bounded} == bounded == by_name(layout, "bounded", tokens)
  bookkeeping = {"ring_tags": 43 * 128 * 4, "block_table": 65_536 // 128 * 4, "status": 5}
  assert {name: held[name] for name in bookkeeping} == bookkeeping


@pytest.mark.slow
def test_a_deferred_call_of_the_released_model():
  cfg = released()
  cache, pending = pending_of(cfg, 1, 6)
  held = held_bytes(cache, cfg.model, pending)
  assert held["call_keys"] == 43 * 6 * 528
  assert held["call_groups"] == 3 * 6 * 2 * 512 * 4
  assert held["call_tokens"] == 6 * 4
