"""Drafts change how many tokens a call gives, never which ones."""

import dataclasses
import functools
from collections.abc import Callable

import frequencies
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
import small
from flax import nnx
from scipy import special
from serving import CFG, LENGTH

from hysparse.cache.allocate import allocate
from hysparse.cache.state import Cache
from hysparse.inference import acceptance, segments, speculate
from hysparse.inference.engine import Engine
from hysparse.inference.requests import Request
from hysparse.inference.sampling import Sampling, SamplingBatch
from hysparse.nn.batch import Batch
from hysparse.nn.unstack import unstack

# Float32 logits of the same function with products summed in another order.
LOGIT_TOLERANCE = 2e-5
BLOCK = CFG.model.draft_block
LENGTHS, NEW = (1, 5, 16, 40), (60, 40, 60, 1)
GREEDY = serving.requests(LENGTHS, NEW)
# One step in a segment: what is told at a time are the accepted drafts and the token behind them.
SPECULATING = {"speculate": True, "segment": 1, "min_acceptance": 0.0}


# --- Models --------------------------------------------------------------------------------------


def changed(state: nnx.State, changes: dict[tuple, Callable]) -> nnx.State:
  """The state with some leaves changed."""
  flat = nnx.to_flat_state(state)
  return nnx.from_flat_state(
    (path, leaf.replace(changes[path](leaf.get_raw_value())) if path in changes else leaf)
    for path, leaf in flat
  )


def taught(state: nnx.State, rows: list[list[int]], vocab: int) -> nnx.State:
  """Drafts that follow the commonest pairs of tokens of some texts."""
  pairs = np.zeros((vocab, vocab), np.float32)
  for row in rows:
    np.add.at(pairs, (row[1:], row[:-1]), 1)
  share = pairs / np.maximum(pairs.sum(0), 1)
  embed, head = ("drafts", "markov", "embed"), ("drafts", "markov", "head")
  # Large enough to outweigh what the untrained draft layers say.
  return changed(state, {embed: lambda x: jnp.eye(*x.shape), head: lambda _: 100 * share})


def predictable(state: nnx.State) -> nnx.State:
  """The last token says nearly all about the next one: it outweighs what the layers add."""
  return changed(state, {("embed", "weight"): lambda x: 3 * x})


KINDS = ("untrained", "other seed", "trained", "predictable")


@dataclasses.dataclass
class Outcome:
  """What both ways of decoding gave."""

  state: nnx.State
  plain: list[list[int]]
  drafted: list[list[int]]
  told: list[list[list[int]]]  # of each request, what came at a time
  calls: int

  @property
  def accepted(self) -> set[int]:
    return {len(tokens) - 1 for pieces in self.told for tokens in pieces[1:]}


@functools.cache
def outcome(kind: str) -> Outcome:
  graphdef, state = small.model(CFG, serving.SEED + (kind == "other seed"))
  if kind == "predictable":
    state = predictable(state)
  plain = serving.served(Engine(graphdef, state, CFG, **serving.SIZES), GREEDY)
  if kind in ("trained", "predictable"):
    state = taught(state, plain, CFG.model.vocab_size)
  engine = Engine(graphdef, state, CFG, **(serving.SIZES | SPECULATING))
  told = [[] for _ in GREEDY]
  drafted = serving.served(engine, GREEDY, on_tokens=lambda n, tokens: told[n].append(tokens))
  assert engine.decoded == sum(NEW) - len(NEW)
  return Outcome(state, plain, drafted, told, engine.calls)


def engine(kind: str) -> Engine:
  """Drafts with what `outcome` was made of."""
  options = serving.SIZES | SPECULATING
  return Engine(small.model(CFG)[0], outcome(kind).state, CFG, **options)


# --- Greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind):
  result = outcome(kind)
  assert result.drafted == result.plain
  told = [[token for piece in pieces for token in piece] for pieces in result.told]
  assert told == result.plain


def test_any_number_of_drafts_is_accepted():
  for kind in ("trained", "predictable"):
    assert outcome(kind).accepted == set(range(BLOCK + 1)), kind
  assert outcome("untrained").accepted >= {0, 1}


def test_good_drafts_save_calls():
  tokens = sum(NEW) - len(NEW)
  assert outcome("untrained").calls <= tokens
  assert outcome("predictable").calls < 0.6 * tokens


@pytest.mark.parametrize("most", range(1, 2 * BLOCK + 4))
def test_the_most_tokens_asked_for_may_end_inside_a_block(most):
  asked = [dataclasses.replace(request, max_new=most) for request in GREEDY[:3]]
  tokens = serving.served(engine("predictable"), asked)
  assert tokens == [row[:most] for row in outcome("predictable").plain[:3]]


def test_a_stop_may_stand_inside_accepted_drafts():
  result, found = outcome("predictable"), set()
  for n in range(3):
    end = 0
    for piece in result.told[n]:
      for place, stop in enumerate(piece):
        if stop not in result.plain[n][: end + place] and len(piece) > 1:
          found.add((n, stop, end + place + 1, place < len(piece) - 1))
      end += len(piece)
  assert {inside for *_, inside in found} == {True, False}, "at an accepted draft and behind them"
  # A few of each kind.
  found = sorted(found, key=lambda one: one[-1])
  for n, stop, size, _ in found[:3] + found[-3:]:
    # The slot's next sequence must not see what came behind the stop.
    asked = [dataclasses.replace(GREEDY[n], stops=(stop,)), *GREEDY[:2]]
    tokens = serving.served(engine("predictable"), asked)
    assert tokens == [result.plain[n][:size], *result.plain[:2]]


def test_where_nothing_is_verified_a_token_is_drawn_as_by_plain_decoding():
  """Of two tokens the second is the last: there is none that a draft could save."""
  choices = [Sampling(1.0, seed=seed) for seed in range(5)]
  asked = serving.requests((3, 5, 9, 12, 16), (2,) * 5, *choices)
  for request, tokens in zip(asked, serving.served(engine("trained"), asked), strict=True):
    serving.check_drawn(request, tokens)


# --- The cache -----------------------------------------------------------------------------------


def prefilled(engine: Engine, cfg, prompts_BxS: np.ndarray, block_tokens=None) -> Cache:
  """A cache that holds equally long prompts, one in each slot."""
  B, S = prompts_BxS.shape
  cache = allocate(cfg, B, LENGTH, block_tokens=block_tokens)
  for b in range(B):
    row = np.zeros((1, 16), np.int32)
    row[0, :S] = prompts_BxS[b]
    cache, *_ = segments.prefill_chunk(
      engine.graphdef, engine.state, cache, jnp.asarray([b], jnp.int32), jnp.asarray(row),
      jnp.asarray([S], jnp.int32), SamplingBatch.of([Sampling()]), prefill="all_layers", more=False,
    )  # fmt: skip
  return cache


def slots_of(anchor_B: np.ndarray, left: int, choices: list[Sampling]) -> segments.Slots:
  B = len(anchor_B)
  return segments.Slots(
    jnp.asarray(anchor_B, jnp.int32),
    jnp.full(B, left, jnp.int32),
    jnp.full((B, 1), segments.NO_TOKEN, jnp.int32),
    SamplingBatch.of(choices),
    jnp.zeros(B, bool),
  )


CONTINUED = 6  # tokens: more than a window, several groups, more than an n-gram


def test_what_follows_finds_the_cache_as_if_nothing_had_been_rejected():
  served = engine("trained")
  prompts = np.asarray([r.prompt[:9] for r in serving.requests((9, 10), (1, 1))])
  cache = prefilled(served, CFG, prompts[:, :-1])
  slots = slots_of(prompts[:, -1], 60, [Sampling(1.0, seed=7), Sampling(0.0)])
  rows, lengths = [list(row) for row in prompts], set()
  for _ in range(8):
    cache, slots, out, _ = speculate.speculate(
      served.graphdef, served.state, cache, slots, steps=1, min_acceptance=0.0
    )
    for row, tokens in zip(rows, np.asarray(out), strict=True):
      row += tokens[tokens >= 0].tolist()
    # Another text than was generated goes on behind what the cache holds.
    held = np.asarray(cache.length_B)
    assert held.tolist() == [len(row) - 1 for row in rows]
    lengths |= set((held % 2).tolist())
    more = small.tokens(CFG, 2, CONTINUED, seed=int(held.sum()))
    found = small.compiled(served.graphdef, served.state, Batch.of(more), cache, all_positions=True)
    for b, row in enumerate(rows):
      whole = Request(prompts[b, :-1].tolist(), 1)
      tokens = [*row[len(prompts[b]) - 1 : -1], *more[b].tolist()]
      want, _ = serving.seen(whole, [*tokens, 0])
      error = np.abs(found.logits_BxNxV[b] - want[-CONTINUED:]).max()
      assert error <= LOGIT_TOLERANCE * np.abs(want).max()
    found.cache.check()
  assert lengths == {0, 1}, "groups of two tokens, finished and not"


def test_a_stale_ring_of_a_draft_layer_is_an_error():
  served = engine("trained")
  prompts = np.asarray([r.prompt[:9] for r in serving.requests((9, 10), (1, 1))])
  cache = prefilled(served, CFG, prompts)
  rings = cache.drafts
  stale = dataclasses.replace(rings, tags_BxW=rings.tags_BxW.at[:, 1, 2].add(-CFG.model.window))
  cache = dataclasses.replace(cache, drafts=stale)
  slots = slots_of(np.array([3, 9]), 60, [Sampling()] * 2)
  cache, *_ = speculate.speculate(
    served.graphdef, served.state, cache, slots, steps=1, min_acceptance=0.0
  )
  np.testing.assert_array_equal(cache.error_B, [False, True])


# --- Other models --------------------------------------------------------------------------------

DRAFTS = {"vocab_size": 16, "draft_noise_id": 5, "draft_markov_rank": 16}
# Every mode, ratios 1, 2 and 8, windows shorter and longer than a block, one and two draft layers.
OTHERS = (
  small.config(
    "full/2+candidates reuse reindex", engram_layers=(1, 2), window=5,
    draft_layers=2, draft_block=4, draft_target_layers=(0, 2), **DRAFTS,
  ),
  small.config(
    "full/8 swa", residual="plain", window=2, engram_layers=(0,),
    draft_layers=1, draft_block=4, draft_target_layers=(1,), **DRAFTS,
  ),
  small.config(
    "full/1 reindex", residual="plain", window=12, train={"numerics": "kvquant"}, rope_dim=4,
    draft_layers=1, draft_block=7, draft_target_layers=(0, 1), **DRAFTS,
  ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cfg", OTHERS, ids=lambda cfg: cfg.model.schedule)
def test_greedy_tokens_are_those_of_plain_decoding_on_other_models(cfg):
  graphdef, state = small.model(cfg)
  asked = serving.requests(LENGTHS, NEW, cfg=cfg)
  plain = serving.served(Engine(graphdef, state, cfg, **serving.SIZES), asked)
  state = taught(state, plain, cfg.model.vocab_size)
  options = serving.SIZES | {"speculate": True, "segment": 3, "min_acceptance": 0.3}
  if cfg.model.draft_block == 7:
    options["block_tokens"] = 32  # sequences of several blocks
  for sure in (False, True):
    # As they are the confidences leave drafts out; raised, all are verified.
    if sure:
      weight = ("drafts", "confidence", "weight")
      state = changed(state, {weight: lambda x: x.at[-DRAFTS["draft_markov_rank"] :].add(50)})
    engine = Engine(graphdef, state, cfg, **options)
    assert serving.served(engine, asked) == plain
    for n, at in ((0, 7), (1, 10), (2, 20), (2, 21)):  # in the middle of segments
      stop, size = plain[n][at], plain[n].index(plain[n][at]) + 1
      stopping = dataclasses.replace(asked[n], stops=(stop,))
      assert serving.served(engine, [stopping, asked[1]]) == [plain[n][:size], plain[1]]
    assert not sure or engine.calls < 0.8 * engine.decoded


# --- Sampled -------------------------------------------------------------------------------------

TINY = small.config(
  "full/2", residual="plain", window=3, vocab_size=3,
  draft_layers=1, draft_block=2, draft_noise_id=1, draft_target_layers=(0,), draft_markov_rank=3,
)  # fmt: skip
TEXT = np.array([0, 2, 1, 1, 0, 2, 1])
COUNTED = 3  # tokens whose joint distribution is looked at: 27 texts
SLOTS = 6_000  # at a time
HOT = 4.0  # temperature: no text is rare


def exact() -> np.ndarray:
  """Probabilities of all texts of COUNTED tokens behind TEXT, by calls without a cache."""
  texts = np.stack(np.unravel_index(np.arange(3**COUNTED), (3,) * COUNTED), axis=1)
  rows = np.concatenate([np.repeat(TEXT[None], len(texts), 0), texts], axis=1)
  logits = small.logits(TINY, Batch.of(jnp.asarray(rows)))[:, len(TEXT) - 1 : -1] / HOT
  share = special.softmax(logits.astype(np.float64), axis=-1)
  return np.take_along_axis(share, texts[..., None], 2).prod((1, 2))


def drawn(decode: Callable) -> np.ndarray:
  """The texts that `decode(graphdef, state, cache, slots)` gives with other seeds, as numbers."""
  graphdef, state = unstack(*small.model(TINY))
  cells = []
  for first in range(0, frequencies.DRAWS, SLOTS):
    cache = allocate(TINY, SLOTS, 16, block_tokens=TINY.model.alignment)
    rows = jnp.asarray(np.repeat(TEXT[None, :-1], SLOTS, 0), jnp.int32)
    choice = SamplingBatch.of([Sampling()] * SLOTS)
    count = jnp.full(SLOTS, len(TEXT) - 1, jnp.int32)
    cache, *_ = segments.prefill_chunk(
      graphdef, state, cache, jnp.arange(SLOTS), rows, count, choice,
      prefill="all_layers", more=False,
    )  # fmt: skip
    choices = [Sampling(HOT, seed=seed) for seed in range(first, first + SLOTS)]
    slots = slots_of(np.full(SLOTS, TEXT[-1]), 9, choices)
    cache, _, out_BxN, *_ = decode(graphdef, state, cache, slots)
    cache.check()
    texts = np.asarray(out_BxN)[:, :COUNTED]
    assert texts.min() >= 0
    cells.append(np.ravel_multi_index(tuple(texts.T), (3,) * COUNTED))
  return np.concatenate(cells)


SPECULATE = functools.partial(speculate.speculate, steps=COUNTED, min_acceptance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
  "decode",
  [functools.partial(segments.decode, steps=COUNTED), SPECULATE],
  ids=["plain", "drafts"],
)
def test_texts_come_as_often_as_the_model_says(decode):
  probabilities = exact()
  assert probabilities.min() * frequencies.DRAWS > frequencies.LEAST_EXPECTED
  assert frequencies.fit(drawn(decode), probabilities)


@pytest.mark.slow
def test_a_sampler_without_the_residual_is_noticed(monkeypatch):
  monkeypatch.setattr(acceptance, "_residual", lambda p_BxV, q_BxV: p_BxV)
  wrong = speculate.speculate.__wrapped__  # not compiled yet
  compiled = jax.jit(lambda *args: wrong(*args, **SPECULATE.keywords), static_argnums=0)
  assert not frequencies.fit(drawn(compiled), exact())
