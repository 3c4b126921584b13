"""DSpark drafts: what they read, what they see, and that cutting the prompt changes nothing.

Their numbers are compared with the published reference in tests/conversion/test_parity.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from hysparse.cache.allocate import allocate
from hysparse.nn import streams
from hysparse.nn.batch import Batch
from hysparse.nn.block import Carry
from hysparse.nn.model import draft

# Float32 logits of the same function with products summed in another order.
LOGIT_TOLERANCE = 2e-5

# Both target layers have Engram: the draft's input is taken behind it.
CFG = small.config(
  "swa full/2 reuse",
  engram_layers=(0, 2),
  draft_layers=2,
  draft_block=3,
  draft_noise_id=7,
  draft_target_layers=(0, 2),
  draft_markov_rank=8,
  draft_experts=3,
  draft_experts_per_token=1,
)
drafted = jax.jit(draft, static_argnums=0)


def fed(tokens, calls):
  """The cache after calls of `calls` tokens each."""
  graphdef, state = small.model(CFG)
  cache, at = allocate(CFG, 2, 48), 0
  for n in calls:
    batch = Batch.of(tokens[:, at : at + n])
    output = small.compiled(graphdef, state, batch, cache)
    cache, at = output.cache, at + n
  return cache


def test_drafts_read_the_streams_behind_engram():
  batch = Batch.of(small.tokens(CFG, 2, 12))
  output = small.compiled(*small.model(CFG), batch, capture=True)
  want = [output.aux.trace[layer]["engram"].mean(2) for layer in (0, 2)]
  np.testing.assert_allclose(
    output.main_hidden_BxSxTD, np.concatenate(want, -1), atol=LOGIT_TOLERANCE
  )
  entering = jnp.broadcast_to(
    small.model(CFG)[1]["embed"]["weight"].get_raw_value()[small.tokens(CFG, 2, 12)], want[0].shape
  )
  assert np.abs(want[0] - entering).max() > 0.01, "Engram changed nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
  "calls", [(1,) * 16, pytest.param((1, 1, 1, 1, 6, 6), marks=pytest.mark.slow)]
)
def test_a_prompt_in_pieces_drafts_as_the_whole(calls):
  graphdef, state = small.model(CFG)
  tokens, anchor = small.tokens(CFG, 2, 16), jnp.asarray([3, 9], jnp.int32)
  whole = drafted(graphdef, state, fed(tokens, (16,)), anchor)
  parts = drafted(graphdef, state, fed(tokens, calls), anchor)
  np.testing.assert_array_equal(parts.ids_BxN, whole.ids_BxN)
  for name in ("logits_BxNxV", "confidence_BxN"):
    want = np.asarray(getattr(whole, name))
    error = np.abs(getattr(parts, name) - want).max()
    assert error <= LOGIT_TOLERANCE * max(1, np.abs(want).max())
  assert not parts.error_B.any()


@pytest.mark.slow
def test_drafts_see_the_window_and_nothing_older():
  graphdef, state = small.model(CFG)
  tokens, anchor = small.tokens(CFG, 2, 16), jnp.asarray([3, 9], jnp.int32)
  cache = fed(tokens, (16,))
  before = drafted(graphdef, state, cache, anchor)
  W = CFG.model.window
  for slot in range(W):
    rows = jax.tree.map(lambda x, slot=slot: x.at[:, :, slot].add(1.0), cache.drafts.rows)
    other = dataclasses.replace(cache, drafts=dataclasses.replace(cache.drafts, rows=rows))
    after = drafted(graphdef, state, other, anchor)
    assert np.abs(after.logits_BxNxV - before.logits_BxNxV).max(-1).min() > 1e-4, slot
  stale = dataclasses.replace(cache.drafts, tags_BxW=cache.drafts.tags_BxW.at[1, 0].add(-W))
  other = dataclasses.replace(cache, drafts=stale)
  np.testing.assert_array_equal(drafted(graphdef, state, other, anchor).error_B, [True, False])
  wrong = dataclasses.replace(cache, error_B=jnp.asarray([False, True]))
  np.testing.assert_array_equal(drafted(graphdef, state, wrong, anchor).error_B, [False, True])


def test_every_position_of_a_block_sees_the_whole_block():
  graphdef, state = small.model(CFG)
  cache = fed(small.tokens(CFG, 2, 16), (16,))
  N, D = CFG.model.draft_block, CFG.model.d_model

  @jax.jit
  def block(state, embedded):
    drafts = nnx.merge(graphdef, state).drafts
    carry = Carry(*streams.begin(embedded, CFG.model.streams))
    return drafts.run_block(cache.drafts, carry, cache.length_B)[0].x_BxSxMxD

  embedded = jax.random.normal(jax.random.key(0), (2, N, D))
  before = block(state, embedded)
  for changed in range(N):
    after = block(state, embedded.at[:, changed].multiply(-1))
    assert (np.abs(after - before).max((2, 3)) > 1e-4).all(), changed


def test_each_draft_is_biased_by_the_token_before_it():
  graphdef, state = small.model(CFG)
  model = nnx.merge(graphdef, state)
  rng = np.random.default_rng(0)
  N, D, V = CFG.model.draft_block, CFG.model.d_model, CFG.model.vocab_size
  x, logits = rng.normal(size=(2, N, D)), rng.normal(size=(2, N, V))
  anchor = np.array([3, 9])
  arguments = (jnp.asarray(a, jnp.float32) for a in (x, logits))
  ids, biased, confidence = model.drafts.decide(*arguments, jnp.asarray(anchor, jnp.int32))
  embed, head, proj = (
    np.asarray(w[...], np.float64)
    for w in (model.drafts.markov.embed, model.drafts.markov.head, model.drafts.confidence.weight)
  )
  for b in range(2):
    token = anchor[b]
    for i in range(N):
      want = logits[b, i] + head @ embed[token]
      np.testing.assert_allclose(biased[b, i], want, atol=LOGIT_TOLERANCE)
      sure = np.concatenate([x[b, i], embed[token]]) @ proj[:, 0]
      np.testing.assert_allclose(confidence[b, i], sure, atol=LOGIT_TOLERANCE)
      token = want.argmax()
      assert ids[b, i + 1] == token
  np.testing.assert_array_equal(ids[:, 0], anchor)
