"""Continuous batching: whatever is in the batch, the tokens are those of the model alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
import small
from compiling import compilations
from flax import nnx
from serving import CFG

from hysparse.cache.allocate import allocate
from hysparse.cache.blocks import OutOfBlocks
from hysparse.cache.state import CacheError
from hysparse.inference import segments
from hysparse.inference.engine import Engine
from hysparse.inference.generate import generate
from hysparse.inference.requests import Request, RequestError
from hysparse.inference.sampling import Sampling
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Output
from hysparse.nn.model import forward

LENGTHS, NEW = (1, 5, 16, 40, 64), (30, 9, 20, 1, 32)
GREEDY = serving.requests(LENGTHS, NEW)
SAMPLED = serving.requests(
  LENGTHS, NEW, Sampling(1.0, seed=3), Sampling(0.7, 0.8, seed=4), Sampling(2.0, min_p=0.1, seed=5)
)
# Other than serving.SIZES in all that must not matter; two of three slots have blocks.
OTHER = {"slots": 3, "segment": 5, "chunk": 10, "pool_tokens": 256}


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
  return serving.served(serving.engine(), GREEDY)


@pytest.fixture(scope="module")
def sampled() -> list[list[int]]:
  return serving.served(serving.engine(), SAMPLED)


# --- Tokens --------------------------------------------------------------------------------------


def test_greedy_tokens_are_what_the_model_without_a_cache_chooses(greedy):
  for request, tokens in zip(GREEDY, greedy, strict=True):
    assert len(tokens) == request.max_new
    serving.check_greedy(request, tokens)


def test_sampled_tokens_are_drawn_from_the_logits_without_a_cache(sampled, greedy):
  for request, tokens in zip(SAMPLED, sampled, strict=True):
    assert len(tokens) == request.max_new
    serving.check_drawn(request, tokens)
  assert sampled != greedy


@pytest.mark.slow
def test_slots_segments_chunks_and_room_change_no_token(greedy, sampled):
  engine = serving.engine(**OTHER)
  assert serving.served(engine, GREEDY + SAMPLED[::-1]) == greedy + sampled[::-1]


def test_a_request_alone_gives_the_same_as_beside_others(sampled):
  for request, tokens in list(zip(SAMPLED, sampled, strict=True))[:3]:
    assert serving.served(serving.engine(), [request]) == [tokens]


def test_the_seed_decides():
  request = SAMPLED[0]
  other = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=99))
  one, two, again = serving.served(serving.engine(), [request, other, request])
  assert one == again != two


def test_tokens_of_a_prompt_use_fewer_experts(greedy):
  request, tokens = GREEDY[4], greedy[4]
  few, _ = serving.seen(request, tokens)
  all_, _ = serving.seen(request, tokens, prompt=False)
  assert np.abs(few - all_).max() > 100 * serving.MARGIN
  assert all_.argmax(1).tolist() != tokens, "the check of greedy tokens would not see it"


def test_other_requests_of_the_same_sizes_compile_nothing(greedy):
  asked = serving.requests((9, 33, 2), (5, 1, 17), Sampling(0.5, 0.9, seed=8))
  with compilations() as names:
    assert len(serving.served(Engine(*small.model(CFG, 5), CFG, **serving.SIZES), asked)) == 3
  assert not names, names


def test_the_length_and_the_calls_are_counted():
  engine = Engine(*small.model(CFG, serving.SEED), CFG, **serving.SIZES)
  serving.served(engine, GREEDY[:2])
  assert engine.decoded == engine.calls == sum(NEW[:2]) - 2


# --- The end of a sequence -----------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4, 8, 13])  # first token, middle and last of a segment
def test_a_stop_token_is_the_last_one(greedy, at):
  stop = greedy[0][at]
  end = greedy[0].index(stop) + 1
  request = dataclasses.replace(GREEDY[0], stops=(stop,))
  results = dict(serving.engine().run([request, GREEDY[1]]))
  assert results[0].tokens.tolist() == greedy[0][:end] and results[0].reason == "stop"
  assert results[1].tokens.tolist() == greedy[1] and results[1].reason == "length"


def test_stops_of_one_request_are_not_those_of_another(greedy):
  stop = greedy[1][0]
  assert stop in greedy[0]
  asked = [GREEDY[0], dataclasses.replace(GREEDY[1], stops=(stop,))]
  assert serving.served(serving.engine(), asked) == [greedy[0], [stop]]


def test_a_stop_token_inside_the_prompt_stops_nothing(greedy):
  stop = next(t for t in range(16) if t in GREEDY[4].prompt and t not in greedy[4])
  request = dataclasses.replace(GREEDY[4], stops=(stop,))
  assert serving.served(serving.engine(), [request]) == [greedy[4]]


# --- Telling, and ending early -------------------------------------------------------------------


def test_tokens_are_told_in_order(greedy):
  told = [[] for _ in GREEDY]
  pieces = []

  def tell(number, tokens):
    told[number] += tokens
    pieces.append(len(tokens))

  done = [(n, told[n] == greedy[n]) for n, _ in serving.engine().run(GREEDY, tell)]
  assert sorted(done) == [(n, True) for n in range(5)], "all told before the result comes"
  assert told == greedy and all(pieces) and max(pieces) <= serving.SIZES["segment"]


def test_closed_early_it_gives_everything_back(greedy):
  engine = serving.engine()
  running = engine.run(GREEDY)
  next(running)
  assert engine._pool.live() > 0
  running.close()
  assert engine._pool.live() == 0
  assert serving.served(engine, GREEDY[:3]) == greedy[:3]


@pytest.mark.parametrize("at", [0, 1])  # after a prompt, after a segment
def test_an_error_of_the_listener_leaves_the_engine_usable(greedy, at):
  told = []

  def tell(number, tokens):
    told.append(tokens)
    if len(told) > 2 * at:  # both slots have had their prompts
      raise KeyError("listener")

  with pytest.raises(KeyError, match="listener"):
    list(serving.engine().run(GREEDY[:2], tell))
  assert serving.engine()._pool.live() == 0
  assert serving.served(serving.engine(), GREEDY[:3]) == greedy[:3]


@pytest.mark.parametrize("part", ["prefill_chunk", "decode"])
def test_an_interrupted_call_leaves_the_engine_usable(greedy, part, monkeypatch):
  """The call has used up the cache that it was given, and what it returns is lost."""
  engine, run = serving.engine(), getattr(segments, part)

  def interrupted(*args, **options):
    run(*args, **options)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(segments, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
      list(engine.run(GREEDY[:2]))
  assert engine._pool.live() == 0
  assert serving.served(engine, GREEDY[:3]) == greedy[:3]


def test_one_run_at_a_time(greedy):
  engine = serving.engine()
  first = engine.run(GREEDY[:3])
  next(first)
  with pytest.raises(RuntimeError, match="run"):
    next(engine.run(GREEDY[:1]))
  assert len(list(first)) == 2
  assert serving.served(engine, GREEDY[:1]) == greedy[:1]


def test_nothing_asked_nothing_done():
  assert list(serving.engine().run([])) == []


def test_one_call_for_a_few_requests(greedy):
  model = small.model(CFG, serving.SEED)
  sizes = {name: serving.SIZES[name] for name in ("max_tokens", "segment", "chunk")}
  results = generate(*model, CFG, [GREEDY[0], GREEDY[1]], **sizes)
  assert [result.tokens.tolist() for result in results] == greedy[:2]
  assert generate(*model, CFG, []) == []
  with pytest.raises(RequestError, match="requests: is one request"):
    generate(*model, CFG, GREEDY[0])


# --- What cannot be served -----------------------------------------------------------------------

BAD = {
  "no prompt": (Request([], 1), r"prompt: has shape \(0,\)"),
  "a table": (Request([[1, 2]], 1), r"prompt: has shape \(1, 2\)"),
  "no whole numbers": (Request([1.5], 1), r"prompt: .* dtype float64"),
  "text": (Request("ab", 1), "prompt: is a text"),
  "lists of several lengths": (Request([[1], [2, 3]], 1), "prompt: is no list of token ids"),
  "beyond the vocabulary": (Request([3, 16], 1), r"prompt: token 16 is not in 0\.\..*\(15\)"),
  "negative": (Request([-1], 1), "prompt: token -1"),
  "stop beyond the vocabulary": (Request([1], 1, stops=(2, 16)), "stops: token 16"),
  "no room": (
    Request([1] * 90, 7),
    "prompt: its 90 tokens and 7 new ones .max_new. are more than the 96",
  ),
  "nothing new": (Request([1], 0), "max_new: is 0"),
  "a part of a token": (Request([1], 2.5), "max_new: is 2.5"),
  "a stop, no tuple": (Request([1], 1, stops=3), "stops: is 3"),
  "no request": ([1, 2], "is a list"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_before_anything_is_computed(case):
  request, message = BAD[case]
  engine = Engine(*small.model(CFG, serving.SEED), CFG, **serving.SIZES)
  with pytest.raises(RequestError, match=f"request 1: {message}") as error:
    next(engine.run([GREEDY[0], request]))
  assert "\n" not in str(error.value)
  assert not engine.programs and engine._pool.live() == 0


def test_a_request_larger_than_the_pool():
  options = serving.SIZES | {"max_tokens": 300, "pool_tokens": 256}
  engine = Engine(*small.model(CFG, serving.SEED), CFG, **options)
  with pytest.raises(OutOfBlocks, match=r"request 1: 257 tokens need 3 blocks .* the pool has 2"):
    list(engine.run([GREEDY[0], Request([1] * 200, 57)]))
  assert not engine.programs and engine._pool.live() == 0


PLAIN = small.config("swa")
LONG_BLOCK = dataclasses.replace(CFG, model=dataclasses.replace(CFG.model, draft_block=4))


@pytest.mark.parametrize(
  "cfg, options, message",
  [
    (CFG, {"slots": 0}, "slots: is 0; must be a whole number from 1 up"),
    (CFG, {"segment": 0}, "segment: is 0"),
    (CFG, {"chunk": -1}, "chunk: is -1"),
    (CFG, {"max_tokens": 0}, "max_tokens: is 0"),
    (CFG, {"pool_tokens": 0}, "pool_tokens: is 0"),
    (CFG, {"prefill": "some"}, "prefill: is 'some'"),
    (CFG, {"prefill": "replay"}, "prefill: 'replay' cannot be used: the schedule has no"),
    (CFG, {"min_acceptance": 1.5}, "min_acceptance: is 1.5"),
    (PLAIN, {"speculate": True}, "speculate: the model has no draft layers"),
    (LONG_BLOCK, {"speculate": True}, "a block of 4 drafts .* than the cache can take back .4"),
  ],
)
def test_an_engine_that_cannot_be(cfg, options, message):
  with pytest.raises((ValueError, CacheError), match=message):
    Engine(*small.model(cfg, serving.SEED), cfg, **(serving.SIZES | options))


def test_there_is_room_for_all_slots_unless_told_otherwise():
  for tokens, blocks in ((5, 3), (128, 3), (129, 6)):
    engine = Engine(*small.model(PLAIN), PLAIN, slots=3, max_tokens=tokens)
    assert engine._pool.free == blocks
  engine = Engine(*small.model(PLAIN), PLAIN, slots=3, max_tokens=129, pool_tokens=300)
  assert engine._pool.free == 3


# --- Numbers that are none -----------------------------------------------------------------------


def with_embedding(state: nnx.State, token: int, value: float) -> nnx.State:
  leaves = []
  for path, leaf in nnx.to_flat_state(state):
    if path == ("embed", "weight"):
      leaf = leaf.replace(leaf.get_raw_value().at[token].set(value))
    leaves.append((path, leaf))
  return nnx.from_flat_state(leaves)


def test_a_token_without_numbers_is_an_error_and_no_token(greedy):
  """The embedding of a token is NaN: one that is generated later, then one of the prompt."""
  request, at = GREEDY[2], 2
  bad = greedy[2][at]
  row = [*request.prompt, *greedy[2]]
  size = len(request.prompt) + at + 1
  other = dataclasses.replace(GREEDY[0], max_new=9)
  assert bad not in row[: size - 1] + greedy[0][:9] + other.prompt and bad != 0  # padding is 0
  graphdef, state = small.model(CFG, serving.SEED)
  engine = Engine(graphdef, with_embedding(state, bad, np.nan), CFG, **serving.SIZES)
  told = []
  for asked, seen in ((request, size), (Request(row[:size], 3), size)):
    with pytest.raises(CacheError, match=f"request 1: .* not numbers after {seen} tokens"):
      list(engine.run([other, asked], lambda number, tokens: told.append((number, tokens))))
    assert engine._pool.live() == 0
  own = [tokens for number, tokens in told if number == 1]
  assert own == [[greedy[2][0]]], "only what came before, in another segment"
  assert serving.served(engine, [other]) == [greedy[0][:9]], "nothing of it stays in the cache"


def test_what_is_no_number_stays_with_its_request(greedy):
  """The first block of the pool, which others read where they select nothing, is the bad one's."""
  graphdef, state = small.model(CFG, serving.SEED)
  engine = Engine(graphdef, with_embedding(state, greedy[2][2], np.nan), CFG, **serving.SIZES)
  told = {0: [], 1: [], 2: []}
  asked = [Request([1], 1), dataclasses.replace(GREEDY[0], max_new=9), GREEDY[2]]
  with pytest.raises(CacheError, match=r"request 2: .* not numbers"):
    list(engine.run(asked, lambda number, tokens: told[number].extend(tokens)))
  assert told[1] == greedy[0][:9] and told[2] == greedy[2][:1]


# --- Replay --------------------------------------------------------------------------------------

REPLAY = small.config("swa | full/1 reuse", vocab_size=16, residual="plain")
REPLAYING = {"chunk": 8, "prefill": "replay", "max_tokens": 32, "segment": 4}
PROMPT = serving.requests([24], [1])[0].prompt
replayed = jax.jit(forward, static_argnums=0, static_argnames="prefill")


def replayed_whole(length: int) -> Output:
  """One call over a whole prompt."""
  row = np.zeros((1, 24), np.int32)
  row[0, :length] = PROMPT[:length]
  batch = Batch.of(jnp.asarray(row), jnp.asarray([length]), is_prompt=True)
  model = small.model(REPLAY, serving.SEED)
  return replayed(*model, batch, allocate(REPLAY, 1, 32), prefill="replay")


def likeliest(logits_V: jax.Array) -> int:
  least, most = np.sort(logits_V)[-2:]
  assert most - least > serving.MARGIN, "take another seed"
  return int(logits_V.argmax())


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 8, 9, 21])  # below a window, a chunk, one more, several
def test_a_replayed_prompt_gives_the_token_of_one_call(length):
  engine = serving.engine(REPLAY, **REPLAYING)
  tokens = serving.served(engine, [Request(PROMPT[:length], 1)])
  assert tokens == [[likeliest(replayed_whole(length).logits_BxNxV[0, 0])]]


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 21])
def test_decoding_goes_on_behind_a_replayed_prompt(length):
  request = Request(PROMPT[:length], 7)
  engine = serving.engine(REPLAY, **REPLAYING)
  (tokens,) = serving.served(engine, [request])
  output = replayed_whole(length)
  every, _ = serving.seen(request, tokens, REPLAY)
  differs = np.abs(every[0] - output.logits_BxNxV[0, 0]).max() > serving.MARGIN
  assert differs == (length > REPLAY.model.window), "an approximation beyond a window, else not"
  for token in tokens:
    assert token == likeliest(output.logits_BxNxV[0, 0])
    batch = Batch.of(jnp.asarray([[token]], jnp.int32))
    output = replayed(*small.model(REPLAY, serving.SEED), batch, output.cache)
