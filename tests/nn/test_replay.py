"""prefill="replay": the decoder's layers see the last W tokens of a prompt, its source sees all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from cache_meaning import assert_same_meaning, meaning
from flax import nnx

from hysparse.cache.allocate import allocate
from hysparse.cache.state import CacheError
from hysparse.nn.attention import Source
from hysparse.nn.batch import Batch
from hysparse.nn.block import Carry, Inputs
from hysparse.nn.handoff import Published
from hysparse.nn.model import draft, forward

# Float32 logits of the same function with products summed in another order.
TOLERANCE = 2e-5

WIDTH, ROOM = 20, 32  # tokens of a call, of which each row has some, and of a sequence
# Before 8 tokens there are no entries: the last logits depend on what the windows let through.
CFG = small.config("swa | full/8 reuse", window=3, top_k=2)
# The decoder begins with Engram, its later selections stay in a pool, drafts read both sides.
EVERY = small.config(
  "full/2 | full/1+candidates reuse reindex",
  engram_layers=(0, 1),
  draft_layers=2,
  draft_block=3,
  draft_noise_id=5,
  draft_target_layers=(0, 2),
  draft_markov_rank=8,
)
configs = pytest.mark.parametrize(
  "cfg", [CFG, pytest.param(EVERY, marks=pytest.mark.slow)], ids=lambda cfg: cfg.model.schedule
)

compiled = jax.jit(
  forward, static_argnums=0, static_argnames=("prefill", "more", "all_positions", "capture")
)


def call(cfg, texts, cache, **how):
  """One call that continues each row by its text."""
  padded = np.stack([np.pad(text, (0, WIDTH - len(text))) for text in texts])
  counts = [len(text) for text in texts]
  return compiled(*small.model(cfg), Batch.of(padded, counts, is_prompt=True), cache, **how)


def replayed(cfg, texts, cache=None, more=False):
  cache = allocate(cfg, len(texts), ROOM) if cache is None else cache
  return call(cfg, texts, cache, prefill="replay", more=more)


def through_all_layers(cfg, texts, cache=None):
  """Logits of all positions, and traces."""
  cache = allocate(cfg, len(texts), ROOM) if cache is None else cache
  return call(cfg, texts, cache, all_positions=True, capture=True)


def prompts(cfg, lengths):
  rows = np.asarray(small.tokens(cfg, len(lengths), max(lengths)))
  return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def last_logits(output, texts):
  """[B, V] from logits of all positions."""
  return np.stack([output.logits_BxNxV[b, len(text) - 1] for b, text in enumerate(texts)])


def close(got, want):
  np.testing.assert_allclose(got, want, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.slow
@configs
def test_prompts_no_longer_than_the_window_are_exact(cfg):
  W = cfg.model.window
  texts = prompts(cfg, (W, W - 1, 1))
  replay, whole = replayed(cfg, texts), through_all_layers(cfg, texts)
  replay.cache.check()
  assert replay.logits_BxNxV.shape == (3, 1, cfg.model.vocab_size)
  close(replay.logits_BxNxV[:, 0], last_logits(whole, texts))
  for slot in range(3):
    one, other = (meaning(cfg, output.cache, slot) for output in (replay, whole))
    assert_same_meaning(one, other, TOLERANCE)


@pytest.mark.slow
def test_only_what_the_last_tokens_see_counts():
  """Windows of 3: through 3 layers the last of 7 tokens sees all, by replay none of the first 2."""
  (text,) = prompts(CFG, (7,))
  other = [text.copy() for _ in range(3)]
  for changed in (1, 2):
    other[changed][changed - 1] = (text[changed - 1] + 1) % CFG.model.vocab_size
  replay = np.asarray(replayed(CFG, other).logits_BxNxV[:, 0])
  np.testing.assert_array_equal(replay[1], replay[0])
  np.testing.assert_array_equal(replay[2], replay[0])
  whole = last_logits(through_all_layers(CFG, other), other)
  assert (np.abs(whole[1:] - whole[0]).max(-1) > 1e-4).all()
  assert np.abs(replay[0] - whole[0]).max() > 1e-3, "replay is an approximation"
  other = [text.copy() for _ in range(3)]
  other[1][2] = (text[2] + 1) % CFG.model.vocab_size
  replay = np.asarray(replayed(CFG, other).logits_BxNxV[:, 0])
  assert np.abs(replay[1] - replay[0]).max() > 1e-4


@pytest.mark.slow
@configs
def test_the_decoder_computes_the_last_tokens_only(cfg):
  lengths, W = (20, 13, 2), cfg.model.window
  texts, start = prompts(cfg, lengths), cfg.model.layers.decoder_start
  each = cfg.model.experts_per_token
  load = np.asarray(replayed(cfg, texts).aux.load_E.sum(-1))
  np.testing.assert_array_equal(load[:start], sum(lengths) * each)
  np.testing.assert_array_equal(load[start:], sum(min(n, W) for n in lengths) * each)
  more = replayed(cfg, texts, more=True)
  np.testing.assert_array_equal(more.aux.load_E.sum(-1), [sum(lengths) * each] * start)
  assert more.logits_BxNxV.shape == (3, 0, cfg.model.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def by_hand(graphdef, state, batch, x_BxSxMxD, pre_BxSxM):
  """[B, V]: entries of all tokens, the decoder's layers on the last W tokens' streams alone.

  Args:
    x_BxSxMxD: streams behind the encoder; and the fold that it hands on.
  """
  model = nnx.merge(graphdef, state)
  start, W = model.config.layers.decoder_start, model.config.window
  first = model.layer(start)
  x_BxSxMxD, _ = first.remember(x_BxSxMxD, model.inputs(batch))
  source = Source(first.attn_norm(first.hc_attn.read(x_BxSxMxD, pre_BxSxM)), batch)
  rows = jnp.arange(len(batch.count_B))[:, None]
  at_BxW = jnp.maximum(batch.count_B - W, 0)[:, None] + jnp.arange(W)
  tail = Batch(*(x[rows, at_BxW] for x in (
    batch.tokens_BxS, batch.positions_BxS, batch.valid_BxS, batch.is_prompt_BxS)))  # fmt: skip
  tail = dataclasses.replace(tail, length_B=at_BxW[:, 0])
  carry, published = Carry(x_BxSxMxD[rows, at_BxW], pre_BxSxM[rows, at_BxW]), Published()
  for i in range(start, len(model.config.layers)):
    own = source if i == start else None
    passed = model.layer(i).transform(carry, Inputs(tail, None), published, source=own)
    carry, published = passed.carry, passed.published
  x_BxWxD = model.norm(first.hc_attn.read(*carry))  # the final fold is that of a sublayer
  return model.logits(x_BxWxD[rows[:, 0], tail.count_B - 1])


@configs
def test_the_logits_are_those_of_a_computation_by_hand(cfg):
  texts = prompts(cfg, (20, 13, 2))
  trace = through_all_layers(cfg, texts).aux.trace[cfg.model.layers.decoder_start - 1]
  padded = np.stack([np.pad(text, (0, WIDTH - len(text))) for text in texts])
  batch = Batch.of(padded, [len(text) for text in texts], is_prompt=True)
  want = np.asarray(by_hand(*small.model(cfg), batch, trace["streams"], trace["pre"]))
  replay = replayed(cfg, texts)
  replay.cache.check()
  close(np.asarray(replay.logits_BxNxV[:, 0]), want)
  whole = last_logits(through_all_layers(cfg, texts), texts)
  assert (np.abs(whole - want).max(-1) > 1e-3)[:2].all(), "replay is an approximation"


def decoded(cfg, cache, steps=4):
  """(logits of each step, the cache) of tokens that follow a prompt one by one."""
  following, logits = np.asarray(small.tokens(cfg, 3, steps, seed=7)), []
  for step in range(steps):
    output = through_all_layers(cfg, list(following[:, step : step + 1]), cache)
    cache = output.cache
    cache.check()
    logits.append(output.logits_BxNxV[:, 0])
  return np.stack(logits), cache


@pytest.mark.slow
@configs
def test_a_prompt_in_pieces_is_the_whole_prompt(cfg):
  texts = prompts(cfg, (20, 13, 5))
  whole = replayed(cfg, texts)
  cache = None
  for cuts in (((0, 4), (0, 5), (0, 0)), ((4, 9), (5, 5), (0, 1))):
    pieces = [text[first:end] for text, (first, end) in zip(texts, cuts, strict=True)]
    cache = replayed(cfg, pieces, cache, more=True).cache
    cache.check()
  # The last piece has at least a window of each.
  pieces = [text[first:] for text, first in zip(texts, (9, 5, 1), strict=True)]
  parts = replayed(cfg, pieces, cache)
  close(parts.logits_BxNxV, np.asarray(whole.logits_BxNxV))
  (one, after), (other, also) = (decoded(cfg, output.cache) for output in (parts, whole))
  close(one, other)
  for slot in range(3):
    for a, b in ((parts.cache, whole.cache), (after, also)):
      assert_same_meaning(meaning(cfg, a, slot), meaning(cfg, b, slot), TOLERANCE)


@pytest.mark.slow
@configs
def test_a_second_prompt_follows_what_was_decoded(cfg):
  W = cfg.model.window
  _, cache = decoded(cfg, replayed(cfg, prompts(cfg, (12, 9, 1))).cache)
  # Up to W tokens: nothing is left out, so it is no approximation of what follows.
  second = prompts(cfg, (W, 2, 1))
  replay, whole = replayed(cfg, second, cache), through_all_layers(cfg, second, cache)
  close(np.asarray(replay.logits_BxNxV[:, 0]), last_logits(whole, second))
  decoded(cfg, replay.cache)
  decoded(cfg, replayed(cfg, prompts(cfg, (12, 2, W + 1)), cache).cache)


def test_too_short_a_last_piece_is_reported_when_decoding_goes_on():
  """Of the W - 1 tokens that the next one's window needs, one has passed through the decoder."""
  texts = prompts(CFG, (20, 13, 5))
  cache = replayed(CFG, [text[:-1] for text in texts], more=True).cache
  cache = replayed(CFG, [text[-1:] for text in texts], cache).cache
  with pytest.raises(CacheError, match=r"sequences \[0, 1, 2\]"):
    decoded(CFG, cache, steps=1)


@pytest.mark.slow
def test_drafts_after_a_replayed_prompt():
  compiled_draft = jax.jit(draft, static_argnums=0)
  texts, anchor = prompts(EVERY, (20, 13, 2)), jnp.asarray([1, 2, 3])
  told = compiled_draft(*small.model(EVERY), replayed(EVERY, texts).cache, anchor)
  assert not told.error_B.any()
  # Drafts see the last W tokens of the layers they read, of which one is in the encoder.
  positions = meaning(EVERY, replayed(EVERY, texts).cache, 0)["drafts positions"]
  np.testing.assert_array_equal(positions, [range(16, 20)] * 2)


@pytest.mark.parametrize(
  ("schedule", "engram", "reason"),
  [
    ("swa", (), "no encoder.decoder bar"),
    ("swa | full/1 full/1", (), r"layer 2 \(full/1\) is a KV source inside the decoder"),
    ("swa | dense/1", (), r"layer 1 \(dense/1\) attends to every entry"),
    ("swa | full/1 mha", (), r"layer 2 \(mha\) keeps K and V of every token"),
    ("swa | full/1 swa", (2,), "layer 2 adds Engram memory inside the decoder"),
  ],
)
def test_schedules_that_cannot_be_replayed_are_refused_with_the_reason(schedule, engram, reason):
  cfg = small.config(schedule, engram_layers=engram)
  with pytest.raises(ValueError, match=f"prefill: 'replay' cannot be used: .*{reason}"):
    refused(cfg, allocate(cfg, 2, 16), prefill="replay")


def refused(cfg, cache, **how):
  graphdef, state = small.model(cfg)
  batch = Batch.of(jnp.zeros((2, 8), jnp.int32), is_prompt=True)
  jax.eval_shape(functools.partial(forward, graphdef, **how), state, batch, cache)


def test_calls_that_cannot_be_replayed_are_refused():
  cache = allocate(CFG, 2, 16)
  with pytest.raises(ValueError, match="prefill='replay' need a cache"):
    refused(CFG, None, prefill="replay")
  for how in ({"all_positions": True}, {"logits_at": jnp.zeros((2, 1), int)}):
    with pytest.raises(ValueError, match="gives the logits of each row's last token only"):
      refused(CFG, cache, prefill="replay", **how)


@pytest.mark.parametrize("more", [False, True])
def test_a_decoder_that_begins_without_a_source_is_refused(more):
  cfg = small.config("full/1 | reuse")
  with pytest.raises(ValueError, match="prefill: 'replay' cannot be used: layer 1"):
    refused(cfg, allocate(cfg, 2, 16), prefill="replay", more=more)
