"""Speculative decoding emits what ancestral sampling would; the checks reject wrong samplers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frequencies import DRAWS, fit

from hysparse.inference import acceptance, sampling
from hysparse.inference.sampling import (
  ACCEPT,
  DRAFT,
  NO_TOKEN,
  Sampling,
  SamplingBatch,
  keys,
  sample,
)

V = 5
N = 2
EMITTED = 3  # tokens checked: at most 3 rounds of at least 1 token
SIGMAS = 5  # of a counted frequency, binomial: 6e-7 of right ones are further off
FLOAT32 = 1e-6  # a sum or product of a few probabilities

accept = jax.jit(acceptance.accept)
distribution = jax.jit(sampling.distribution)
plain = jax.jit(lambda seed_B, position_B, log_p: sample(keys(seed_B, position_B), log_p))


def skips_the_residual(target, proposal, drafts, limit_B, seed_B, position_B):
  """A wrong sampler: draws from p where a draft was refused."""
  accepted_B, _ = acceptance.accept(target, proposal, drafts, limit_B, seed_B, position_B)
  p_BxV = target[jnp.arange(len(drafts)), accepted_B]
  return accepted_B, sample(keys(seed_B, position_B + accepted_B), p_BxV)


def accepts_always(target, proposal, drafts, limit_B, seed_B, position_B):
  """A wrong sampler: every verified draft stands."""
  del proposal
  p_BxV = target[jnp.arange(len(drafts)), limit_B]
  return limit_B, sample(keys(seed_B, position_B + limit_B), p_BxV)


def shares_a_random_number(target, proposal, drafts, limit_B, seed_B, position_B):
  """A wrong sampler: what refused a draft also chooses the token in its place."""
  accepted_B, _ = acceptance.accept(target, proposal, drafts, limit_B, seed_B, position_B)
  row = jnp.arange(len(drafts))
  p, q = jnp.exp(target[row, accepted_B]), jnp.exp(proposal[row, jnp.minimum(accepted_B, N - 1)])
  weights = jnp.where((accepted_B < limit_B)[:, None], jnp.maximum(p - q, 0), p)
  u_B = jax.vmap(lambda key: sampling.uniform(key, ()))(
    keys(seed_B, position_B + accepted_B, ACCEPT)
  )
  share_BxV = jnp.cumsum(weights, -1) / weights.sum(-1, keepdims=True)
  return accepted_B, (share_BxV <= u_B[:, None]).sum(-1)


@functools.partial(jax.jit, static_argnames="verdict")
def emitted(p_VxV, q_VxV, confidence_V, limit_B, *, verdict=acceptance.accept):
  """The first tokens [B, EMITTED] of many sequences whose next token depends on their last one.

  Every round drafts, decides from the confidence how many drafts to verify (at most `limit_B`), and
  goes on after the verdict's token: as in decoding, the positions of refused drafts come again.

  Returns:
    The tokens, and how many drafts stood in the first round.
  """
  seed_B = jnp.arange(DRAWS)
  row_Bx1 = seed_B[:, None]

  def one_round(state, _):
    tokens_BxL, length_B = state  # the first token was given
    position_B = length_B + 1000
    known = [tokens_BxL[seed_B, length_B - 1]]
    for i in range(N):
      known.append(sample(keys(seed_B, position_B + i, DRAFT), q_VxV[known[-1]]))
    known_BxM = jnp.stack(known, axis=1)
    drafts_BxN, before_BxN = known_BxM[:, 1:], known_BxM[:, :-1]
    wanted_B = acceptance.verify_length(confidence_V[before_BxN], 0.3)
    accepted_B, next_B = verdict(
      p_VxV[known_BxM], q_VxV[before_BxN], drafts_BxN, jnp.minimum(wanted_B, limit_B), seed_B,
      position_B,
    )  # fmt: skip
    # Past the next token stand refused drafts, which the following round overwrites.
    emitted_BxM = jnp.pad(drafts_BxN, ((0, 0), (0, 1))).at[seed_B, accepted_B].set(next_B)
    tokens_BxL = tokens_BxL.at[row_Bx1, length_B[:, None] + jnp.arange(N + 1)].set(emitted_BxM)
    return (tokens_BxL, length_B + accepted_B + 1), accepted_B

  start = jnp.zeros((DRAWS, 1 + EMITTED * (N + 1)), jnp.int32), jnp.ones(DRAWS, jnp.int32)
  (tokens_BxL, _), accepted_RxB = jax.lax.scan(one_round, start, length=EMITTED)
  return tokens_BxL[:, 1 : 1 + EMITTED], accepted_RxB[0]


def table(seed, **fields):
  """Log-probabilities [V, V] of the next token by the last one, of random logits."""
  logits = np.random.default_rng(seed).normal(0, 1.5, (V, V)).astype(np.float32)
  return distribution(logits, SamplingBatch.of([Sampling(**{"temperature": 1.0} | fields)] * V))


def only(ids, log_p):
  p = np.exp(log_p) * np.isin(np.arange(V), ids)
  with np.errstate(divide="ignore"):
    return np.log(p / p.sum(-1, keepdims=True))


PAIRS = {  # what the model gives, what the drafts are drawn from
  "random": (table(0), table(1)),
  "flat proposal": (table(4), table(5, temperature=1e3)),
  "equal": (table(6), table(6)),
  "disjoint": (only([0, 2, 4], table(7)), only([1, 3], table(8))),
  "greedy drafts": (table(9), table(9, temperature=0.0)),
  "greedy drafts that are wrong": (table(10), table(11, temperature=0.0)),
  "filtered": (table(12, top_p=0.6), table(13, min_p=0.3)),
  "greedy target": (table(16, temperature=0.0), table(17)),
}
SURE_V = np.full(V, 9, np.float32)  # confidence that asks for every draft
MIXED_V = np.asarray([2, -3, 0.5, 1, -0.2], np.float32)  # asks for 0, 1 or 2, as the tokens are
FULL_B = np.full(DRAWS, N, np.int32)
RAGGED_B = np.arange(DRAWS, dtype=np.int32) % (N + 1)


def right(p_VxV, tokens_BxE) -> list[bool]:
  """Whether the first token, the first two, and all three are as ancestral sampling gives them."""
  p_VxV = np.exp(np.asarray(p_VxV, np.float64))
  joint, cell, found = p_VxV[0], np.zeros(DRAWS, int), []
  for tokens_B in np.asarray(tokens_BxE).T:
    cell = cell * V + tokens_B
    found.append(fit(cell, joint / joint.sum()))
    joint = joint[..., None] * p_VxV
  return found


@pytest.mark.parametrize("pair", PAIRS)
def test_emitted_tokens_are_ancestral_samples_and_as_many_drafts_stand_as_can(pair):
  p_VxV, q_VxV = PAIRS[pair]
  tokens_BxE, accepted_B = emitted(p_VxV, q_VxV, SURE_V, FULL_B)
  assert right(p_VxV, tokens_BxE) == [True] * EMITTED
  overlap = min(float(np.minimum(np.exp(p_VxV[0]), np.exp(q_VxV[0])).sum()), 1)
  deviation = np.sqrt(overlap * (1 - overlap) / DRAWS)
  assert abs((accepted_B >= 1).mean() - overlap) <= SIGMAS * deviation + FLOAT32


@pytest.mark.parametrize("pair", ["random", "greedy drafts that are wrong", "filtered"])
def test_verifying_fewer_drafts_leaves_the_samples_as_they_are(pair):
  p_VxV, q_VxV = PAIRS[pair]
  tokens_BxE, accepted_B = emitted(p_VxV, q_VxV, MIXED_V, RAGGED_B)
  assert right(p_VxV, tokens_BxE) == [True] * EMITTED
  assert (accepted_B <= RAGGED_B).all()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["random", "greedy drafts that are wrong"])
@pytest.mark.parametrize("verdict", [skips_the_residual, accepts_always, shares_a_random_number])
def test_the_check_rejects_a_wrong_sampler(verdict, pair):
  p_VxV, q_VxV = PAIRS[pair]
  tokens_BxE, _ = emitted(p_VxV, q_VxV, SURE_V, FULL_B, verdict=verdict)
  assert right(p_VxV, tokens_BxE) == [False] * EMITTED


B, M, W = 64, 4, 7  # rows, positions, vocabulary of the tests below


def case(seed, **fields):
  """Target, proposal and drafts of B rows; limits 0 .. M - 1, seeds and positions that differ."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(B, 2 * M, W)).astype(np.float32)
  log_probs = np.asarray(distribution(logits, SamplingBatch.of([Sampling(**fields)] * B)))
  target, proposal = log_probs[:, :M], log_probs[:, M:-1]
  # Half the drafts are what a greedy target takes, so that runs of accepted ones are long.
  likeliest, random = target[:, :-1].argmax(-1), rng.integers(0, W, (B, M - 1))
  drafts = np.where(rng.random((B, M - 1)) < 0.5, likeliest, random)
  arrays = drafts, np.arange(B) % M, np.arange(B) // 2, np.arange(B) + 100
  return target, proposal, *(x.astype(np.int32) for x in arrays)


def verdict(*inputs):
  return [np.asarray(x) for x in accept(*inputs)]


@pytest.mark.parametrize("greedy_drafts", [True, False])
def test_temperature_0_accepts_exactly_the_likeliest_tokens(greedy_drafts):
  target, proposal, drafts, limit_B, *where = case(0, temperature=0.0)
  if greedy_drafts:
    proposal = np.where(np.arange(W) == drafts[..., None], 0, -np.inf).astype(np.float32)
  else:
    proposal = case(0, temperature=2.0)[1]
  accepted_B, next_B = verdict(target, proposal, drafts, limit_B, *where)
  likeliest = target.argmax(-1)
  for b in range(B):
    count = 0
    while count < limit_B[b] and drafts[b, count] == likeliest[b, count]:
      count += 1
    assert (accepted_B[b], next_B[b]) == (count, likeliest[b, count])
  assert len(set(accepted_B)) == M


def test_without_a_verified_draft_the_token_is_the_one_of_plain_decoding():
  target, proposal, drafts, limit_B, seed_B, position_B = case(2, temperature=1.0)
  accepted_B, next_B = verdict(target, proposal, drafts, limit_B, seed_B, position_B)
  plain_B = np.asarray(plain(seed_B, position_B, target[:, 0]))
  none_B = limit_B == 0
  np.testing.assert_array_equal(next_B[none_B], plain_B[none_B])
  assert not accepted_B[none_B].any()
  # The same after drafts that all stood.
  last_B = np.asarray(plain(seed_B, position_B + limit_B, target[np.arange(B), limit_B]))
  all_B = accepted_B == limit_B
  assert all_B.sum() > none_B.sum()
  np.testing.assert_array_equal(next_B[all_B], last_B[all_B])


def test_a_verdict_does_not_depend_on_the_slot_or_the_neighbours():
  inputs = case(4, temperature=1.0)
  order = np.random.default_rng(0).permutation(B)
  want = [x[order] for x in verdict(*inputs)]
  moved = [x[order] for x in inputs]
  np.testing.assert_array_equal(verdict(*moved), want)
  half = B // 2
  others = [np.concatenate([x[:half], y[half:]]) for x, y in zip(inputs, moved, strict=True)]
  np.testing.assert_array_equal(np.stack(verdict(*others))[:, half:], np.stack(want)[:, half:])


def test_limits_outside_their_range_are_clipped():
  target, proposal, drafts, _, *where = case(6, temperature=1.0)
  for given, meant in ((99, M - 1), (-5, 0)):
    got, want = (
      verdict(target, proposal, drafts, np.full(B, n, np.int32), *where) for n in (given, meant)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("unknown", [-1, W])
def test_an_id_outside_the_vocabulary_is_not_accepted(unknown):
  target, proposal, drafts, _, *where = case(8, temperature=1.0)
  drafts[:, 1] = unknown
  accepted_B, next_B = verdict(target, proposal, drafts, np.full(B, M - 1, np.int32), *where)
  assert accepted_B.max() == 1 and next_B.min() >= 0


def test_a_draft_that_the_model_never_gives_is_not_accepted_whatever_its_proposal():
  target, _, drafts, _, *where = case(12, temperature=1.0)
  target = target.copy()
  target[np.arange(B), 0, drafts[:, 0]] = -np.inf
  equal = target[:, :-1]  # nothing is left of p - q: the token comes from p
  accepted_B, next_B = verdict(target, equal, drafts, np.full(B, M - 1, np.int32), *where)
  np.testing.assert_array_equal(accepted_B, np.zeros(B))
  np.testing.assert_array_equal(next_B, plain(*where, target[:, 0]))


def test_nan_gives_no_token_where_it_would_decide_and_only_there():
  target, proposal, drafts, _, *where = case(10, temperature=1.0)
  full_B = np.full(B, M - 1, np.int32)
  accepted_B, next_B = verdict(target, proposal, drafts, full_B, *where)
  for part in (0, 1):
    poisoned = target.copy(), proposal.copy()
    poisoned[part][:, 1] = np.nan
    got_accepted_B, got_next_B = verdict(*poisoned, drafts, full_B, *where)
    reached_B = accepted_B >= 1
    assert 0 < reached_B.sum() < B
    np.testing.assert_array_equal(got_accepted_B, np.minimum(accepted_B, 1))
    np.testing.assert_array_equal(got_next_B, np.where(reached_B, NO_TOKEN, next_B))


@pytest.mark.parametrize("part, at", [(0, np.s_[:, 1:]), (1, np.s_[:, 1:]), (2, np.s_[:, :0])])
def test_shapes_that_do_not_fit_are_refused(part, at):
  inputs = list(case(0, temperature=1.0))
  inputs[part] = inputs[part][at]
  with pytest.raises(ValueError, match=r"^accept: target \(.*must be \[B, N\+1, V\]"):
    acceptance.accept(*inputs)


def test_drafts_are_verified_while_all_of_them_probably_stand():
  confidence_BxN = np.random.default_rng(0).normal(1.5, 2, (500, 6)).astype(np.float32)
  chance_BxN = np.cumprod(1 / (1 + np.exp(-confidence_BxN.astype(np.float64))), axis=-1)
  lengths = []
  for least in (0.0, 0.01, 0.3, 0.7, 1.0):
    assert np.abs(chance_BxN - least).min() > FLOAT32 or least in (0, 1)
    lengths.append(acceptance.verify_length(confidence_BxN, least))
    np.testing.assert_array_equal(lengths[-1], (chance_BxN >= least).sum(-1))
  assert (np.diff(lengths, axis=0) <= 0).all()
  np.testing.assert_array_equal(lengths[2], acceptance.verify_length(confidence_BxN))


def test_a_length_reads_no_confidence_past_the_first_draft_left_out():
  confidence = np.asarray([[9, -9, 9, 9], [9, -9, -5, np.nan], [9, np.nan, 9, 9]], np.float32)
  np.testing.assert_array_equal(acceptance.verify_length(confidence), [1, 1, 1])


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(value):
  with pytest.raises(ValueError, match=r"^min_acceptance: .*; must be a number from 0 to 1$"):
    acceptance.verify_length(np.zeros((1, 2)), value)
