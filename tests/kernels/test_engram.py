"""Engram: the device hash against NumPy int64 and plain integers, and the gate and its gradient."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hysparse_kernels.engram import HashConstants, gate, hash_constants, hash_rows
from hysparse_kernels.engram.specs import SPECS
from hysparse_kernels.engram.tables import PRIME_LIMIT, primes_from

# float32 sums of up to 32 products, against float64.
GATE_TOLERANCE = 5e-6
# One bfloat16 rounding of the result.
BFLOAT16_TOLERANCE = 2**-7
# The gradient has factors 1/sqrt|dot| of up to 500, which enlarge the rounding of dot.
GRADIENT_TOLERANCE = 2e-4

by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
both = pytest.mark.parametrize("backend", ["reference", "xla"])
few = settings(max_examples=12, derandomize=True, deadline=None)

released = hash_constants((1, 14), 4, 8, 16_000_000, 99_092)
jitted_hash = jax.jit(hash_rows, static_argnums=(2, 3))
jitted_gate = jax.jit(gate, static_argnames=("eps", "backend"))


def int64_rows(ids, positions, constants, pad_id, dead):
  """The published arithmetic in int64, vectorised over tokens."""
  ids = np.where(dead, -1, ids).astype(np.int64)
  rows, value, alive = [], np.zeros_like(ids), np.ones(ids.shape, bool)
  for back, multiplier in enumerate(constants.multipliers):
    past = np.full_like(ids, -1)
    past[:, back:] = ids[:, : ids.shape[1] - back]
    alive &= (past >= 0) & (positions - back >= 0)
    value ^= np.where(alive, past, pad_id) * np.int64(multiplier)
    if back:
      for prime, offset in zip(
        constants.primes[back - 1], constants.offsets[back - 1], strict=True
      ):
        rows.append(value % prime + offset)
  return np.stack(rows, -1)


def plain_rows(ids, positions, constants, pad_id):
  """One token at a time with Python's integers: slow, and with nothing in common with ours."""
  result = []
  for row, places in zip(ids.tolist(), positions.tolist(), strict=True):
    for t, place in enumerate(places):
      gram = []
      for back in range(len(constants.multipliers)):
        stopped = back > place or back > t or row[t - back] < 0
        if stopped:
          gram += [pad_id] * (len(constants.multipliers) - back)
          break
        gram.append(row[t - back])
      start = 0
      for order, primes in enumerate(constants.primes):
        value = 0
        for back in range(order + 2):
          value ^= gram[back] * constants.multipliers[back]
        for prime in primes:
          result.append(start + value % prime)
          start += prime
  return np.reshape(result, (*ids.shape, constants.columns))


def packed(rng, batch, length, documents):
  """Positions of rows that hold several documents."""
  starts = rng.random((batch, length)) < documents / length
  starts[:, 0] = True
  places = np.arange(length)
  return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)


# --- Constants ---------------------------------------------------------------------------------


def test_released_tables_have_the_published_rows():
  assert [table.rows for table in released] == [384_006_168, 384_016_682]
  assert max(itertools.chain.from_iterable(released[1].primes)) == 16_000_889


def test_primes_are_those_of_the_published_search():
  """Restart for every layer and order, skip what any of them already took."""

  def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

  tables = hash_constants((0, 3, 7), max_ngram=3, heads=5, vocab=90, compressed_vocab=50)
  taken = set()
  for table in tables:
    for primes in table.primes:
      for prime in primes:
        n = 90
        while n in taken or not is_prime(n):
          n += 1
        taken.add(n)
        assert prime == n


@pytest.mark.parametrize("start", [0, 2, 3, 24, 113, 7919, 1_000_000])
def test_primes_from(start):
  limit = start + 3000
  sieve = np.ones(limit, bool)
  sieve[:2] = False
  for d in range(2, int(limit**0.5) + 1):
    sieve[d * d :: d] = False
  np.testing.assert_array_equal(primes_from(start, 40), start + np.flatnonzero(sieve[start:])[:40])


def test_offsets_are_the_running_sum_order_major():
  table = released[0]
  flat = [p for heads in table.primes for p in heads]
  assert [o for heads in table.offsets for o in heads] == [sum(flat[:i]) for i in range(len(flat))]
  assert table.columns == len(flat) == 24


def test_multipliers_depend_on_layer_and_vocabulary_and_products_fit():
  small, other = hash_constants((1, 14), 4, 8, 1000, 99_092)
  assert small.multipliers == released[0].multipliers
  assert small.multipliers != other.multipliers
  assert hash_constants((1,), 4, 8, 1000, 99_091)[0].multipliers != small.multipliers
  for m in small.multipliers + other.multipliers:
    assert m % 2 == 1
    assert 0 < m * 99_091 < 2**63


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"vocab": PRIME_LIMIT - 20}, "engram_vocab: .* prime .* below 2\\^24"),
    ({"vocab": PRIME_LIMIT}, "engram_vocab: is 16777216; must be in 1..16777215"),
    ({"vocab": 16_000_000, "heads": 64}, "engram_vocab: .* rows are int32"),
    ({"max_ngram": 1}, "engram_max_ngram: is 1; must be at least 2"),
    ({"heads": 0}, "engram_heads: is 0"),
    ({"compressed_vocab": 0}, "engram_compressed_vocab: is 0"),
  ],
)
def test_illegal_sizes_are_refused_by_name(changed, message):
  arguments = {"layers": (1,), "max_ngram": 4, "heads": 8, "vocab": 1000, "compressed_vocab": 99}
  with pytest.raises(ValueError, match=message):
    hash_constants(**(arguments | changed))


# --- Hash --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "constants",
  [
    *released,
    hash_constants((5,), 4, 8, PRIME_LIMIT - 1000, 7)[0],  # the largest multipliers and primes
    hash_constants((2,), 3, 12, 60, 2**31)[0],  # the largest ids
    dataclasses.replace(released[1], multipliers=(2**63 // 99_092 - 1,) * 4),
  ],
  ids=["released_1", "released_14", "largest_multipliers", "largest_ids", "product_near_2_63"],
)
def test_millions_of_rows_equal_int64(constants):
  rng = np.random.default_rng(constants.layer)
  vocab = min(2**63 // max(constants.multipliers), 2**31 - 1)
  shape = (4, 12_288)
  ids = rng.integers(0, vocab, shape, dtype=np.int32)
  ids[0, ::7] = vocab - 1
  positions = packed(rng, *shape, documents=40)
  dead = rng.random(shape) < 0.1
  got = jitted_hash(jnp.asarray(ids), jnp.asarray(positions), constants, 2, dead_BxS=dead)
  want = int64_rows(ids, positions, constants, 2, dead)
  assert want.size >= 1_000_000
  np.testing.assert_array_equal(got, want)
  assert got.dtype == jnp.int32
  assert want.min() >= 0
  assert want.max() < constants.rows


@few
@given(
  layer=st.integers(0, 60),
  max_ngram=st.integers(2, 5),
  heads=st.integers(1, 3),
  vocab=st.integers(1, 16_000_000),
  compressed=st.integers(1, 2**31),
  batch=st.integers(1, 2),
  length=st.integers(1, 9),
  seed=st.integers(0, 99),
)
def test_any_shape_equals_plain_integers(
  layer, max_ngram, heads, vocab, compressed, batch, length, seed
):
  (constants,) = hash_constants((layer,), max_ngram, heads, vocab, compressed)
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, compressed, (batch, length))
  ids = np.where(rng.random(ids.shape) < 0.15, -1, ids).astype(np.int32)
  positions = packed(rng, batch, length, documents=2)
  pad = int(rng.integers(0, compressed))
  got = jitted_hash(ids, positions, constants, pad)
  np.testing.assert_array_equal(got, plain_rows(ids, positions, constants, pad))


def test_a_document_and_a_dead_token_hide_what_is_behind_them():
  rng = np.random.default_rng(0)
  length, cut = 40, 17
  ids = jnp.asarray(rng.integers(0, 99_092, (1, length)), jnp.int32)
  other = ids.at[:, :cut].set(rng.integers(0, 99_092, cut))
  whole = jnp.arange(length)[None]
  restarted = jnp.where(whole < cut, whole, whole - cut)
  rows = lambda ids, positions, **dead: jitted_hash(ids, positions, released[0], 2, **dead)  # noqa: E731
  assert (rows(ids, whole) != rows(other, whole))[:, cut : cut + 3].any(-1).all()
  np.testing.assert_array_equal(rows(ids, restarted)[:, cut:], rows(other, restarted)[:, cut:])
  # A dead token at the cut hides the past, but itself counts as one place of padding.
  dead = whole == cut
  np.testing.assert_array_equal(
    rows(ids, whole, dead_BxS=dead)[:, cut:], rows(other, whole, dead_BxS=dead)[:, cut:]
  )
  padding = rows(jnp.full_like(ids, 2), whole)[0, 10]
  np.testing.assert_array_equal(rows(ids, whole, dead_BxS=dead)[0, cut], padding)


@pytest.mark.parametrize("dead_id", [-1, -2, -99_092, -(2**31)])
def test_a_negative_id_is_a_dead_token(dead_id):
  rng = np.random.default_rng(1)
  ids = jnp.asarray(rng.integers(0, 99_092, (2, 30)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(30), ids.shape)
  dead = jnp.asarray(rng.random(ids.shape) < 0.2)
  want = jitted_hash(ids, positions, released[0], 2, dead_BxS=dead)
  got = jitted_hash(jnp.where(dead, dead_id, ids), positions, released[0], 2)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("chunks", [(1,) * 24, (5, 1, 2, 16), (23, 1)])
def test_chunks_with_history_equal_the_whole(chunks):
  rng = np.random.default_rng(2)
  ids = np.where(rng.random((2, 24)) < 0.1, -1, rng.integers(0, 99_092, (2, 24))).astype(np.int32)
  positions = packed(rng, 2, 24, documents=3)
  whole = jitted_hash(ids, positions, released[1], 2)
  history, parts, start = np.full((2, 3), -1, np.int32), [], 0
  for size in chunks:
    part = slice(start, start + size)
    parts.append(jitted_hash(ids[:, part], positions[:, part], released[1], 2, history_BxL=history))
    history = np.concatenate([history, ids[:, part]], axis=1)[:, -3:]
    start += size
  np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
  # Without the history the first tokens of a chunk differ: it really matters.
  alone = jitted_hash(ids[:, 1:], positions[:, 1:], released[1], 2)
  assert (np.asarray(alone)[:, :3] != np.asarray(whole)[:, 1:4]).any()


def test_bad_arguments_are_refused_by_name():
  ids = jnp.zeros((2, 5), jnp.int32)
  with pytest.raises(ValueError, match="pad_id: is -1"):
    hash_rows(ids, ids, released[0], -1)
  with pytest.raises(ValueError, match=r"history_BxL: has shape \(2, 2\); must be \(2, 3\)"):
    hash_rows(ids, ids, released[0], 2, history_BxL=jnp.zeros((2, 2), jnp.int32))


def test_constants_are_hashable_and_frozen():
  assert hash(released[0]) != hash(released[1])
  with pytest.raises(dataclasses.FrozenInstanceError):
    released[0].layer = 3
  assert isinstance(released[0], HashConstants)


# --- Gate --------------------------------------------------------------------------------------

DIFFERENTIABLE = ("x_NxMxD", "key_NxMxD", "value_NxD", "q_weight_MxD", "k_weight_MxD")


def gate_in_float64(x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD, dead_N, eps):
  x, key, value, q_weight, k_weight = (
    np.asarray(a, np.float64) for a in (x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD)
  )
  rms = lambda a: np.sqrt((a**2).mean(-1) + eps)  # noqa: E731
  dot = np.einsum("nmd,md,nmd->nm", x, q_weight * k_weight, key)
  dot /= rms(x) * rms(key) * np.sqrt(x.shape[-1])
  opened = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)))
  opened[np.asarray(dead_N)] = 0
  return x + opened[..., None] * value[:, None]


@by_name
@both
def test_gate_equals_float64(spec, backend):
  arguments = spec.arguments()
  got = jitted_gate(**arguments, backend=backend)
  assert got.dtype == arguments["x_NxMxD"].dtype
  want = gate_in_float64(**arguments)
  tolerance = BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else GATE_TOLERANCE
  np.testing.assert_allclose(
    np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).std()
  )


def gradients(arguments, cotangent, backend):
  rest = {k: v for k, v in arguments.items() if k not in DIFFERENTIABLE}

  def loss(*values):
    y = gate(**dict(zip(DIFFERENTIABLE, values, strict=True)), **rest, backend=backend)
    return jnp.sum(y.astype(jnp.float32) * cotangent)

  run = jax.jit(jax.grad(loss, argnums=tuple(range(5))))
  return run(*(arguments[k] for k in DIFFERENTIABLE))


@by_name
def test_gate_gradients_agree(spec):
  arguments = spec.arguments()
  rng = np.random.default_rng(1)
  cotangent = jnp.asarray(rng.normal(size=arguments["x_NxMxD"].shape), jnp.float32)
  want = gradients(arguments, cotangent, "reference")
  got = gradients(arguments, cotangent, "xla")
  tolerance = BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else GRADIENT_TOLERANCE
  for name, a, b in zip(DIFFERENTIABLE, got, want, strict=True):
    assert a.dtype == arguments[name].dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), err_msg=name)


@both
def test_gate_gradient_equals_finite_differences(backend):
  arguments = next(s for s in SPECS if s.name == "odd_sizes_and_dead_tokens").arguments()
  rng = np.random.default_rng(2)
  cotangent = rng.normal(size=arguments["x_NxMxD"].shape)
  grads = gradients(arguments, jnp.asarray(cotangent, jnp.float32), backend)
  step = 1e-6
  for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
    direction = rng.normal(size=grad.shape)
    ahead, behind = (
      gate_in_float64(**(arguments | {name: np.asarray(arguments[name], np.float64) + h}))
      for h in (step * direction, -step * direction)
    )
    slope = ((ahead - behind) * cotangent).sum() / (2 * step)
    size = np.linalg.norm(grad) * np.linalg.norm(direction)
    assert abs(slope - (np.asarray(grad, np.float64) * direction).sum()) < (
      GRADIENT_TOLERANCE * size
    ), name


@both
def test_a_zero_dot_opens_the_gate_halfway_and_has_no_slope(backend):
  arguments = SPECS[0].arguments()
  for zeroed in (("x_NxMxD",), ("key_NxMxD",), ("x_NxMxD", "key_NxMxD")):
    changed = arguments | {k: jnp.zeros_like(arguments[k]) for k in zeroed}
    y = jitted_gate(**changed, backend=backend)
    # dot = 0: sigmoid(sqrt(1e-6)) of the value is added.
    opened = 1 / (1 + np.exp(-1e-3))
    want = changed["x_NxMxD"] + opened * changed["value_NxD"][:, None]
    np.testing.assert_allclose(y, want, rtol=GATE_TOLERANCE, atol=GATE_TOLERANCE)
    # Nothing passes through the gate: the streams get their own gradient and no more.
    dx, dkey, _, dq_weight, dk_weight = gradients(changed, jnp.ones_like(y), backend)
    np.testing.assert_array_equal(dx, 1)
    for grad in (dkey, dq_weight, dk_weight):
      np.testing.assert_array_equal(grad, 0)


@both
def test_a_negative_zero_dot_counts_as_negative(backend):
  """The dot underflows to -0.0 (or, where denormals exist, to something just below it)."""
  tiny = jnp.zeros((1, 1, 16)).at[..., 0].set(1.0)
  y = jitted_gate(
    tiny,
    -2e-38 * tiny,
    jnp.ones((1, 16)),
    jnp.ones((1, 16)),
    jnp.ones((1, 16)),
    eps=1.0,
    backend=backend,
  )
  np.testing.assert_allclose(y[0, 0, 1], 1 / (1 + np.exp(1e-3)), rtol=1e-6)


@both
def test_dead_tokens_get_nothing_and_pass_gradients_through(backend):
  arguments = next(s for s in SPECS if s.name == "odd_sizes_and_dead_tokens").arguments()
  dead = np.asarray(arguments["dead_N"])
  assert dead.any()
  y = jitted_gate(**arguments, backend=backend)
  np.testing.assert_array_equal(y[dead], arguments["x_NxMxD"][dead])
  assert (np.asarray(y)[~dead] != np.asarray(arguments["x_NxMxD"])[~dead]).any(-1).all()
  ones = jnp.ones_like(y)
  dx, dkey, dvalue, _, _ = gradients(arguments, ones, backend)
  np.testing.assert_array_equal(dx[dead], ones[dead])
  np.testing.assert_array_equal(dkey[dead], 0)
  np.testing.assert_array_equal(dvalue[dead], 0)


@both
def test_what_a_dead_token_would_add_may_be_no_number(backend):
  arguments = next(s for s in SPECS if s.name == "odd_sizes_and_dead_tokens").arguments()
  dead, ones = arguments["dead_N"], jnp.ones_like(arguments["x_NxMxD"])
  broken = arguments | {"value_NxD": jnp.where(dead[:, None], jnp.nan, arguments["value_NxD"])}
  for got, want in zip(
    (jitted_gate(**broken, backend=backend), *gradients(broken, ones, backend)),
    (jitted_gate(**arguments, backend=backend), *gradients(arguments, ones, backend)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, want)
