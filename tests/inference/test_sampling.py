"""Distributions against their definition in float64; draws by frequency and by repetition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frequencies import DRAWS, fit

from hysparse.inference import sampling
from hysparse.inference.sampling import NO_TOKEN, Sampling, SamplingBatch

# A probability in float32: rounding of a gap of at most 16 temperatures (further ones are below
# 1e-6), of its exp and of the normalisation.
PROBABILITY = 2e-6
# A share or a cut-off closer to its bound than this may fall on either side of it in float32.
MARGIN = 1e-5
ROWS, TOKENS = 100, 40

distribution = jax.jit(sampling.distribution)
sample = jax.jit(sampling.sample)
draw = jax.jit(sampling.draw)
keys = jax.jit(sampling.keys, static_argnums=2)


def defined(logits_V, temperature, top_p, min_p):
  """Probabilities as the words define them, and how far the cuts are from changing their mind."""
  values = np.asarray([temperature, top_p, min_p], np.float32).astype(np.float64)
  temperature, top_p, min_p = values
  logits_V = np.asarray(logits_V, np.float64)
  p_V = np.exp((logits_V - logits_V.max()) / temperature)
  kept_V = p_V >= min_p
  margin = np.abs(p_V[p_V < 1] / max(min_p, 1e-30) - 1).min(initial=1)
  p_V = np.where(kept_V, p_V, 0) / p_V[kept_V].sum()
  if top_p < 1:
    order_V = np.argsort(-logits_V, kind="stable")
    mass_V = np.cumsum(p_V[order_V])
    margin = min(margin, np.abs(mass_V - top_p).min())
    p_V[order_V[np.argmax(mass_V >= top_p) + 1 :]] = 0
  return p_V / p_V.sum(), margin


def settings(**fields):
  """One row per entry of the lists."""
  names, columns = fields.keys(), fields.values()
  return SamplingBatch.of(
    [Sampling(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
  )


def probabilities(logits_BxV, **fields):
  """exp(distribution), padded to one shape, which is compiled once."""
  B, V = np.shape(logits_BxV)
  logits = np.pad(
    np.asarray(logits_BxV, np.float32), ((0, ROWS - B), (0, TOKENS - V)), constant_values=-np.inf
  )
  rows = settings(**{name: [*column] + [0.5] * (ROWS - B) for name, column in fields.items()})
  return np.exp(np.asarray(distribution(logits, rows)))[:B, :V]


@pytest.mark.parametrize("tied", [False, True])
def test_distributions_are_the_definition(tied):
  grid = list(itertools.product((1e-3, 0.6, 1.0, 1e3), (1e-9, 0.1, 0.5, 0.9, 1.0), (0, 0.05, 0.5)))
  rng = np.random.default_rng(0)
  logits_BxV = rng.normal(0, 2, (len(grid), TOKENS)).astype(np.float32)
  logits_BxV = np.round(logits_BxV) if tied else logits_BxV
  logits_BxV[:, 7] = -np.inf
  names = ("temperature", "top_p", "min_p")
  got_BxV = probabilities(logits_BxV, **dict(zip(names, zip(*grid, strict=True), strict=True)))
  clear = 0
  for logits_V, got_V, row in zip(logits_BxV, got_BxV, grid, strict=True):
    want_V, margin = defined(logits_V, *row)
    if margin > MARGIN:
      clear += 1
      np.testing.assert_array_equal(got_V == 0, want_V.astype(np.float32) == 0)
      np.testing.assert_allclose(got_V, want_V, rtol=0, atol=PROBABILITY)
  assert clear >= 0.9 * len(grid)


def test_ties_go_to_the_lower_id_and_the_token_that_crosses_stays():
  rows = [  # logits, top_p, which stay: masses are exact in float32
    ([0, 0, 0, 0], 0.5, [0, 1]),
    ([0, 0, 0, 0], 0.51, [0, 1, 2]),
    ([0, 0, 0, 0], 1e-50, [0]),
    ([-9e9, 5, -9e9, 5], 0.5, [1]),
    ([-9e9, 5, -9e9, 5], 0.75, [1, 3]),
    ([-200, 5, -200, -200], 1 - 1e-7, [1]),
    ([16, 0, -9e9, -9e9], 1 - 2**-23, [0]),  # its mass is the share, to the bit
  ]
  got = probabilities([r[0] for r in rows], temperature=[1.0] * 7, top_p=[r[1] for r in rows])
  for got_V, (_, _, stay) in zip(got, rows, strict=True):
    np.testing.assert_array_equal(np.flatnonzero(got_V), stay)
    np.testing.assert_allclose(got_V[stay], 1 / len(stay), rtol=0, atol=PROBABILITY)


def test_temperature_0_is_the_first_likeliest_token():
  rng = np.random.default_rng(1)
  logits_BxV = np.round(rng.normal(0, 1.5, (ROWS, TOKENS)))
  got_BxV = probabilities(
    logits_BxV, temperature=[0.0, 1e-42] * 50, top_p=[0.3, 1.0] * 50, min_p=[0.0, 1.0] * 50
  )
  np.testing.assert_array_equal(got_BxV, np.eye(TOKENS)[logits_BxV.argmax(-1)])


def test_min_p_1_keeps_the_likeliest_ones_only():
  got = probabilities([[3, 1, 3, 2.9999]], temperature=[5.0], min_p=[1.0])
  np.testing.assert_allclose(got, [[0.5, 0, 0.5, 0]], rtol=0, atol=PROBABILITY)


def test_a_vocabulary_of_one():
  log_p = distribution(jnp.full((2, 1), 3.0), settings(temperature=[0.0, 1.0], top_p=[1, 0.1]))
  np.testing.assert_array_equal(log_p, np.zeros((2, 1)))
  np.testing.assert_array_equal(sample(keys(jnp.arange(2), 0), log_p), [0, 0])


def test_a_row_without_a_distribution_gives_no_token():
  fine, inf = [1.0, 2.0, 3.0], np.inf
  logits = [fine, [1, np.nan, 3], [1, inf, 3], [-inf] * 3, [np.nan, inf, -inf], [-inf, 2, -inf]]
  rows = settings(temperature=[0.0] * 6 + [1.0] * 12, top_p=[1.0] * 12 + [0.5] * 6)
  log_p = np.asarray(distribution(np.tile(np.asarray(logits, np.float32), (3, 1)), rows))
  np.testing.assert_array_equal(np.isnan(log_p).all(-1), [0, 1, 1, 1, 1, 0] * 3)
  np.testing.assert_array_equal(np.isnan(log_p).any(-1), [0, 1, 1, 1, 1, 0] * 3)
  ids_3xB = np.asarray(sample(keys(np.arange(18), 0), log_p)).reshape(3, 6)
  np.testing.assert_array_equal(ids_3xB[:, 1:], [[NO_TOKEN] * 4 + [1]] * 3)
  assert ids_3xB[:, 0].min() >= 0 and ids_3xB.max() < 3


def test_more_positions_of_a_sequence_share_its_settings():
  logits = np.random.default_rng(0).normal(size=(3, 4, 20)).astype(np.float32)
  rows = settings(temperature=[0.0, 1.0, 0.5], top_p=[1, 0.5, 0.9], min_p=[0, 0.1, 0])
  whole = distribution(logits, rows)
  parts = [distribution(logits[:, i], rows) for i in range(4)]
  np.testing.assert_array_equal(whole, np.stack(parts, axis=1))


def test_the_top_p_search_is_run_only_where_it_is_asked_for_and_moves_no_other_row():
  logits = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
  jaxpr = jax.make_jaxpr(sampling.distribution)(logits, settings(top_p=[1, 1, 1]))
  outer = [equation.primitive.name for equation in jaxpr.eqns]
  assert "cond" in outer and not {"scan", "while", "sort"} & set(outer)
  alone, mixed = (
    distribution(logits, settings(temperature=[1.0] * 3, top_p=[p, 1, 1], min_p=[0, 0.1, 0]))
    for p in (1, 0.5)
  )
  np.testing.assert_array_equal(alone[1:], mixed[1:])
  assert (alone[0] != mixed[0]).any()


def test_a_draw_depends_on_its_seed_and_position_only():
  p_BxV = np.random.default_rng(0).dirichlet(np.ones(100), 12)
  log_p = np.log(p_BxV).astype(np.float32)
  seed_B, position_B = np.arange(12) // 3, np.arange(12) + 1000
  whole_B = np.asarray(sample(keys(seed_B, position_B), log_p))
  order = np.random.default_rng(0).permutation(12)
  moved_B = sample(keys(seed_B[order], position_B[order]), log_p[order])
  np.testing.assert_array_equal(moved_B, whole_B[order])
  alone_B = sample(keys(seed_B[4:5], position_B[4:5]), log_p[4:5])
  np.testing.assert_array_equal(alone_B, whole_B[4:5])
  rest_B = np.arange(12) > 0
  others = np.asarray(sample(keys(seed_B + 7 * rest_B, position_B + 5 * rest_B), log_p))
  assert others[0] == whole_B[0] and (others[1:] != whole_B[1:]).any()


def test_keys_are_all_different_whatever_the_seed():
  seeds = np.asarray([0, 1, 2, 2**31, 2**32 - 1], np.uint32)[:, None]
  positions = np.asarray([*range(40), 2**20, 2**31 - 1])
  bits = [
    np.asarray(jax.random.key_data(keys(seeds, positions, stream))).reshape(-1, 2)
    for stream in (sampling.TOKEN, sampling.DRAFT, sampling.ACCEPT)
  ]
  assert len(np.unique(np.concatenate(bits), axis=0)) == 3 * seeds.size * positions.size


P_V = np.asarray([0.4, 0.0, 0.25, 0.05, 0.001, 0.299, 0.0])


@pytest.mark.parametrize("varies", ["seed", "position"])
def test_frequencies_are_the_probabilities_and_neighbours_are_independent(varies):
  steps = np.arange(DRAWS + 1)
  seeds, positions = (steps, 3) if varies == "seed" else (3, steps)
  weights = np.tile(P_V.astype(np.float32), (DRAWS + 1, 1))
  ids_B = np.asarray(draw(keys(seeds, positions), weights))
  assert fit(ids_B[1:], P_V)
  assert not fit(ids_B[1:], np.roll(P_V, 1))
  assert fit(ids_B[1:] * len(P_V) + ids_B[:-1], np.outer(P_V, P_V))


def test_small_faults_of_the_probabilities_are_seen():
  rng = np.random.default_rng(0)
  off_V = P_V * np.asarray([1.06, 1, 0.94, 1, 1, 1, 1])
  ids_B = rng.choice(len(P_V), DRAWS, p=off_V / off_V.sum())
  assert not fit(ids_B, P_V)


def test_an_index_without_weight_is_never_taken():
  weights_V = np.asarray([0, 0, 2e-38, 0, 0, 3e-38, 0], np.float32)  # products of these vanish
  ids_B = np.asarray(draw(keys(np.arange(2000), 0), np.tile(weights_V, (2000, 1))))
  np.testing.assert_array_equal(np.unique(ids_B), [2, 5])


def test_weights_that_are_no_distribution_give_no_token():
  weights = np.asarray([[0, 0, 0], [1, np.nan, 1], [1, np.inf, 1], [0, 0, 1]], np.float32)
  np.testing.assert_array_equal(draw(keys(np.arange(4), 0), weights), [NO_TOKEN] * 3 + [2])


def test_a_large_vocabulary():
  V = 1000
  p_V = np.random.default_rng(2).dirichlet(np.full(V, 0.02))
  weights = np.tile(p_V.astype(np.float32), (2000, 1))
  parts = [draw(keys(np.arange(2000), at), weights) for at in range(DRAWS // 2000)]
  assert fit(np.concatenate(parts), p_V)


def test_uniform_numbers_reach_between_the_generators_steps():
  u = np.asarray(sampling.uniform(jax.random.key(0), (100_000,)), np.float64)
  assert u.min() >= 0 and u.max() < 1
  small = u[u < 2**-8]
  assert (small * 2**23 % 1 != 0).mean() > 0.9
  assert fit((u * 50).astype(int), np.full(50, 1 / 50))


def test_any_mix_of_settings_is_one_program():
  program = jax.jit(lambda x, rows: sampling.distribution(x, rows))
  for rows in ({"temperature": [0, 1]}, {"top_p": [0.5, 1]}, {"min_p": [0.1, 0], "seed": [3, 4]}):
    program(jnp.zeros((2, 8)), settings(**rows))
  assert program._cache_size() == 1


@pytest.mark.parametrize(
  "field, value",
  [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("min_p", -1e-9),
    ("min_p", 1.5),
    ("min_p", None),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", 1.0),
    ("seed", True),
  ],
)
def test_settings_outside_their_range_are_refused(field, value):
  with pytest.raises(ValueError, match=rf"^sampling\.{field}: .*; must be ") as error:
    Sampling(**{field: value})
  assert repr(value) in str(error.value) and "\n" not in str(error.value)


def test_settings_compare_by_value():
  assert hash(Sampling(0.5, seed=np.int64(3))) == hash(Sampling(0.5, seed=3))
  assert Sampling() == Sampling(temperature=0.0, top_p=1.0, min_p=0.0, seed=0)
  rows = SamplingBatch.of([Sampling(0.5, 0.9, 0.1, 2**32 - 1)])
  assert rows.seed_B.dtype == jnp.uint32 and int(rows.seed_B[0]) == 2**32 - 1
  np.testing.assert_allclose(
    [rows.temperature_B[0], rows.top_p_B[0], rows.min_p_B[0]], [0.5, 0.9, 0.1], rtol=1e-6
  )
