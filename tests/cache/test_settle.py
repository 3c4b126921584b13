"""A call of which the first tokens stay leaves what a call of only these leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from cache_meaning import assert_same_meaning, meaning
from hypothesis import given, settings
from hypothesis import strategies as st
from hysparse_kernels.formats import Stored
from paged_calls import CFG, POOL, WIDTH, call, fed, fresh, reserved, text

from hysparse.cache.groups import PartialGroup
from hysparse.cache.layout import kept_tokens
from hysparse.cache.ring import EMPTY, Ring
from hysparse.cache.settle import Pending, settle
from hysparse.cache.state import Cache, LayerCache, Pages
from hysparse.nn.batch import Batch
from hysparse.nn.model import forward

# Float32 logits of the same function with products summed in another order.
LOGIT_TOLERANCE = 2e-5

settled = jax.jit(settle)

# --- On made-up rows -----------------------------------------------------------------------------

B, RATIOS, HISTORY, ROOM = 2, (2, 3, 4, 5), 3, 1000


def row_of(b, position):
  """What token `position` of sequence b writes."""
  return 1000.0 * b + position


def state_after(lengths, window):
  """A cache of sequences of these lengths: a ring, a ring of two drafts, groups of all ratios."""

  def ring(layers):
    rows = np.zeros((layers, B, window, 1), np.float32)
    tags = np.full((layers, B, window), EMPTY, np.int32)
    for n, b in np.ndindex(layers, B):
      for p in range(max(0, lengths[b] - window), lengths[b]):
        rows[n, b, p % window], tags[n, b, p % window] = row_of(b, p) + n / 2, p
    return Ring(Stored.plain(rows), tags)

  def group(ratio):
    rows = np.full((B, ratio - 1, 1), -7, np.float32)  # what is not in use may be anything
    for b, length in enumerate(lengths):
      for i in range(length % ratio):
        rows[b, i] = row_of(b, length - length % ratio + i)
    return PartialGroup(rows, -rows)

  history = [[max(-1, length - HISTORY + i) for i in range(HISTORY)] for length in lengths]
  return Cache(
    layers=(LayerCache(ring(1)), *(LayerCache(ring(1), group(r)) for r in RATIOS)),
    drafts=ring(2),
    history_BxL=np.int32(history),
    length_B=np.int32(lengths),
    error_B=np.zeros(B, bool),
    pages=Pages(np.zeros((B, 1), np.int32), ROOM, 1),
    precision=None,
  )


def pending_of(lengths, counts, kept):
  """What calls of `counts` tokens would write, of which the last `kept` are kept."""
  first = [max(0, count - kept) for count in counts]
  position = np.asarray(lengths)[:, None] + np.asarray(first)[:, None] + np.arange(kept)
  rows = np.asarray([[row_of(b, p) for p in position[b]] for b in range(B)], np.float32)[..., None]
  stack = lambda n: Stored.plain(np.stack([rows + np.float32(i / 2) for i in range(n)]))  # noqa: E731
  call = PartialGroup(rows, -rows)
  return Pending(
    windows=(stack(1),) * (1 + len(RATIOS)),
    groups=(None, *(call for _ in RATIOS)),
    drafts=stack(2),
    ids_BxN=np.int32(position),
    count_B=np.int32(counts),
    error_B=np.zeros(B, bool),
  )


def kept_of(window):
  """Of so many last tokens of a call something is kept."""
  return max(window, RATIOS[-1] - 1, HISTORY)


def check_rows(cache, lengths, window):
  """The cache is the one of sequences of these lengths, but for what is not in use."""
  cache, want = jax.device_get(cache), state_after(lengths, window)
  for name in ("length_B", "error_B", "history_BxL"):
    np.testing.assert_array_equal(getattr(cache, name), getattr(want, name), err_msg=name)
  rings = [
    (layer.window, other.window) for layer, other in zip(cache.layers, want.layers, strict=True)
  ]
  for ring, other in [*rings, (cache.drafts, want.drafts)]:
    np.testing.assert_array_equal(ring.tags_BxW, other.tags_BxW)
    used = np.asarray(other.tags_BxW) >= 0
    np.testing.assert_array_equal(ring.rows.parts["values"][used], other.rows.parts["values"][used])
  for ratio, layer, other in zip(RATIOS, cache.layers[1:], want.layers[1:], strict=True):
    used = np.arange(ratio - 1) < np.asarray(lengths)[:, None] % ratio
    for got, expected in zip(
      vars(layer.partial).values(), vars(other.partial).values(), strict=True
    ):
      np.testing.assert_array_equal(got[used], expected[used])


LENGTHS = st.tuples(*[st.integers(0, 30)] * B)


@pytest.mark.parametrize("window", [2, 9])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(LENGTHS, st.data())
def test_any_number_of_first_tokens_may_stay(window, lengths, data):
  width = kept_of(window)
  counts = data.draw(st.tuples(*[st.integers(0, width)] * B))
  accepted = data.draw(st.tuples(*[st.integers(0, count) for count in counts]))
  cache, pending = state_after(lengths, window), pending_of(lengths, counts, width)
  after = np.add(lengths, accepted)
  check_rows(settled(cache, pending, np.int32(accepted)), after, window)


@pytest.mark.parametrize("window", [2, 9])
@settings(derandomize=True, deadline=None, max_examples=20)
@given(LENGTHS, st.tuples(*[st.integers(0, 40)] * B))
def test_of_a_long_call_its_last_tokens_are_enough(window, lengths, counts):
  cache, pending = state_after(lengths, window), pending_of(lengths, counts, kept_of(window))
  check_rows(settled(cache, pending, np.int32(counts)), np.add(lengths, counts), window)


def test_errors_stay_and_only_what_stays_can_outgrow_its_blocks():
  cache, pending = state_after((998, 0), 2), pending_of((998, 0), (4, 4), 4)
  np.testing.assert_array_equal(settled(cache, pending).error_B, [True, False])
  after = settled(cache, pending, jnp.asarray([3, 0]))
  np.testing.assert_array_equal(after.error_B, [True, False])
  after = settled(cache, pending, jnp.asarray([2, 0]))
  np.testing.assert_array_equal(after.error_B, [False, False])
  np.testing.assert_array_equal(after.length_B, [1000, 0])
  for name, wrong in (("cache", cache), ("pending", pending)):
    changed = {name: dataclasses.replace(wrong, error_B=jnp.asarray([False, True]))}
    after = settled(
      **({"cache": cache, "pending": pending} | changed), accepted_B=jnp.zeros(2, int)
    )
    np.testing.assert_array_equal(after.error_B, [False, True])


# --- In a model ----------------------------------------------------------------------------------

# Per-row numbers of tokens that stay, of calls of (4, 4, 3): each sequence meets each number.
ACCEPTED = ((0, 4, 2), (1, 3, 0), (2, 2, 3), (3, 1, 1), (4, 0, 2))
COUNTS = (4, 4, 3)


def check_rollback(cfg, lengths=(13, 6, 0)):
  cache, pool = fresh(cfg, 120 if cfg is not CFG else POOL)
  cache = reserved(cache, pool, [n + 8 for n in lengths])
  _, cache = fed(cache, [text(n, seed) for seed, n in enumerate(lengths)], cfg=cfg)
  drafted = np.stack([text(WIDTH, 10 + b) for b in range(3)])
  after = np.stack([text(WIDTH, 20 + b) for b in range(3)])
  whole = call(cache, drafted, COUNTS, cfg=cfg, defer=True)
  np.testing.assert_array_equal(whole.cache.length_B, cache.length_B)
  for accepted in ACCEPTED:
    rolled = settled(whole.cache, whole.pending, jnp.asarray(accepted))
    rolled.check()
    # The same program, so equal to the bit; and the ordinary call.
    only = call(cache, drafted, accepted, cfg=cfg, defer=True)
    only = settled(only.cache, only.pending)
    ordinary = call(cache, drafted, accepted, cfg=cfg).cache
    for slot in range(3):
      assert_same_meaning(meaning(cfg, rolled, slot), meaning(cfg, only, slot))
      assert_same_meaning(meaning(cfg, rolled, slot), meaning(cfg, ordinary, slot))
    got = call(rolled, after, (4, 4, 4), cfg=cfg)
    want = call(only, after, (4, 4, 4), cfg=cfg)
    np.testing.assert_allclose(
      got.logits_BxNxV, want.logits_BxNxV, atol=LOGIT_TOLERANCE * np.abs(want.logits_BxNxV).max()
    )
    got.cache.check()


@pytest.mark.slow
def test_rejected_tokens_leave_no_trace():
  assert CFG.model.window < WIDTH <= kept_tokens(CFG.model)
  check_rollback(CFG)


@pytest.mark.slow
@pytest.mark.parametrize(
  "cfg",
  [
    small.config("full/1+candidates reindex", window=7, train={"numerics": "official"}),
    small.config("mha dense/3", window=5),
  ],
  ids=lambda cfg: cfg.model.schedule,
)
def test_rejected_tokens_leave_no_trace_in_other_schedules(cfg):
  check_rollback(cfg)


@pytest.mark.slow
def test_a_deferred_call_has_the_logits_of_an_ordinary_one():
  cache, pool = fresh()
  cache = reserved(cache, pool, [8, 8, 8])
  _, cache = fed(cache, [text(4, 0), text(1, 1), text(3, 2)])
  tokens = np.stack([text(WIDTH, b) for b in range(3)])
  one, other = (call(cache, tokens, COUNTS, defer=defer) for defer in (False, True))
  np.testing.assert_allclose(
    other.logits_BxNxV, one.logits_BxNxV, atol=LOGIT_TOLERANCE * np.abs(one.logits_BxNxV).max()
  )
  assert one.pending is None


def test_a_call_longer_than_what_is_kept_cannot_be_deferred():
  graphdef, state = small.model(CFG)
  cache, _ = fresh()
  batch = Batch.of(jnp.zeros((3, 5), jnp.int32))
  with pytest.raises(ValueError, match="defer keeps calls of at most 4 tokens, this one has 5"):
    jax.eval_shape(functools.partial(forward, graphdef, defer=True), state, batch, cache)
  with pytest.raises(ValueError, match="need a cache"):
    jax.eval_shape(functools.partial(forward, graphdef, defer=True), state, batch)
