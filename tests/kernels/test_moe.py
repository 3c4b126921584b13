"""Mixture of experts: the experts and their gradients against float64, and the balance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats_oracle import oracle_dequantise, oracle_quantise
from hysparse_kernels import tuning
from hysparse_kernels.formats import Quantised, quantise
from hysparse_kernels.moe import (
  Separate,
  expert_load,
  moe,
  sequence_balance_loss,
  swiglu,
)
from hysparse_kernels.moe.specs import SPECS
from hysparse_kernels.moe.xla import make_plan

# float32 sums of up to 331 products of unit size, against float64, relative to the largest value.
TOLERANCE = 3e-6
# The inner activation is rounded to bfloat16, the sums are not.
BFLOAT16_TOLERANCE = 2**-6

by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
every = pytest.mark.parametrize("backend", ["reference", "xla", "ragged_dot"])

WEIGHTS = ("w_gate", "w_up", "w_down")
DIFFERENTIABLE = ("x_NxD", "weights_NxA", *WEIGHTS)


def spec_named(name):
  return next(spec for spec in SPECS if spec.name == name)


def assert_close(got, want, tolerance, name=""):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  limit = tolerance * max(np.abs(want).max(), 1e-3)
  np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=name)


# --- Experts -----------------------------------------------------------------------------------


def moe_in_float64(x_NxD, ids_NxA, weights_NxA, w_gate, w_up, w_down, limit):
  x, weights, w1, w3, w2 = (
    np.asarray(a, np.float64) for a in (x_NxD, weights_NxA, w_gate, w_up, w_down)
  )
  y = np.zeros_like(x)
  for (n, a), e in np.ndenumerate(np.asarray(ids_NxA)):
    if e >= 0:
      gate, up = x[n] @ w1[e], x[n] @ w3[e]
      if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
      y[n] += (weights[n, a] * gate / (1 + np.exp(-gate)) * up) @ w2[e]
  return y


@functools.cache
def compiled(backend, limit, **options):
  return jax.jit(functools.partial(moe, limit=limit, backend=backend, **options))


@functools.cache
def compiled_with_gradients(backend, limit, **options):
  """y and the gradients of sum(y * cotangent): one compilation serves all tests of a spec."""

  def loss(values, ids_NxA, cotangent):
    y = moe(**values, ids_NxA=ids_NxA, limit=limit, backend=backend, **options)
    return jnp.sum(y * cotangent), y

  return jax.jit(jax.grad(loss, has_aux=True))


def run(arguments, backend, seed=1, **options):
  """(y, gradients by name, the cotangent)."""
  cotangent = np.random.default_rng(seed).normal(size=arguments["x_NxD"].shape)
  values = {name: arguments[name] for name in DIFFERENTIABLE}
  step = compiled_with_gradients(backend, arguments["limit"], **options)
  grads, y = step(values, arguments["ids_NxA"], cotangent.astype(np.float32))
  return y, grads, cotangent


@by_name
@every
def test_experts_equal_float64(spec, backend):
  arguments = spec.arguments()
  want = moe_in_float64(**arguments)
  got, _, _ = run(arguments, backend)
  assert got.dtype == jnp.float32
  assert_close(got, want, BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else TOLERANCE)


@by_name
def test_gradients_agree(spec):
  arguments = spec.arguments()
  want, got = (run(arguments, backend)[1] for backend in ("reference", "xla"))
  tolerance = BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else TOLERANCE
  for name in DIFFERENTIABLE:
    assert got[name].dtype == arguments[name].dtype
    assert_close(got[name], want[name], tolerance, name)


@every
@pytest.mark.parametrize("name", ["odd_sizes", "clamped", "fewer_than_a"])
def test_gradients_equal_finite_differences(name, backend):
  arguments = spec_named(name).arguments()
  _, got, cotangent = run(arguments, backend)
  rng = np.random.default_rng(2)
  for argument, grad in got.items():
    direction = rng.normal(size=grad.shape)
    ahead, behind = (
      (moe_in_float64(**(arguments | {argument: moved})) * cotangent).sum()
      for moved in (
        np.asarray(arguments[argument], np.float64) + h * direction for h in (1e-6, -1e-6)
      )
    )
    slope = (ahead - behind) / 2e-6
    size = np.linalg.norm(grad) * np.linalg.norm(direction)
    assert abs(slope - (np.asarray(grad, np.float64) * direction).sum()) < 1e-5 * size, argument


def test_the_specs_clamp_and_leave_experts_empty():
  """What the tests above rely on."""
  arguments = spec_named("clamped").arguments()
  gate = np.einsum("nd,edf->nef", arguments["x_NxD"], arguments["w_gate"])
  assert (gate > 0.5).mean() > 0.1
  assert (gate < -0.5).mean() > 0.1
  for name in ("empty_experts", "more_experts_than_rows", "one_expert_gets_all"):
    spec = spec_named(name)
    assert (expert_load(spec.arguments()["ids_NxA"], spec.experts) == 0).any()
  assert (spec_named("fewer_than_a").arguments()["ids_NxA"] < 0).all(1).any()


@every
@pytest.mark.parametrize("name", ["empty_experts", "fewer_than_a"])
def test_what_is_not_routed_gets_exactly_nothing(name, backend):
  spec = spec_named(name)
  arguments = spec.arguments()
  ids = np.asarray(arguments["ids_NxA"])
  y, grads, _ = run(arguments, backend)
  empty = np.asarray(expert_load(arguments["ids_NxA"], spec.experts)) == 0
  for weight in WEIGHTS:
    np.testing.assert_array_equal(grads[weight][empty], 0)
    assert (np.abs(np.asarray(grads[weight])[~empty]).max((1, 2)) > 0).all()
  np.testing.assert_array_equal(grads["weights_NxA"][ids < 0], 0)
  nowhere = (ids < 0).all(1)
  np.testing.assert_array_equal(y[nowhere], 0)
  np.testing.assert_array_equal(grads["x_NxD"][nowhere], 0)


@every
@pytest.mark.parametrize("bad", [-1, -7, 5, 2**31 - 1])
def test_an_id_that_is_no_expert_never_indexes(bad, backend):
  arguments = spec_named("even").arguments()
  dropped = np.random.default_rng(0).random(arguments["ids_NxA"].shape) < 0.4
  limit = arguments.pop("limit")
  arguments["weights_NxA"] = jnp.where(dropped, 0, arguments["weights_NxA"])
  want = compiled(backend, limit)(**arguments)
  arguments["ids_NxA"] = jnp.where(dropped, bad, arguments["ids_NxA"])
  arguments["weights_NxA"] = jnp.where(dropped, 3.0, arguments["weights_NxA"])
  assert_close(compiled(backend, limit)(**arguments), want, TOLERANCE)


@every
def test_where_bfloat16_is_rounded(backend):
  """Once, after weight * activation: any other order gives another result."""
  bf16 = lambda value: float(jnp.bfloat16(value))  # noqa: E731
  weight, down, active = 1.3, 1.25, 4 / (1 + np.exp(-2.0))  # both halves are clamped to 2
  want = bf16(weight * active) * down
  others = (
    bf16(bf16(weight * active) * down),
    bf16(weight * active * down),
    weight * bf16(active) * down,
    bf16(weight * bf16(active)) * down,
  )
  assert want not in others
  fill = lambda value, rank: jnp.full((1,) * rank, value, jnp.bfloat16)  # noqa: E731
  got = compiled(backend, 2.0)(
    x_NxD=fill(9.0, 2),
    ids_NxA=jnp.zeros((1, 1), jnp.int32),
    weights_NxA=jnp.full((1, 1), weight, jnp.float32),
    w_gate=fill(1.0, 3),
    w_up=fill(1.0, 3),
    w_down=fill(down, 3),
  )
  assert got[0, 0] == want


# --- Quantised weights and the rounding of the released code -----------------------------------


@jax.jit
def mxfp4(weights):
  """Weights as checkpoints hold them, and what they stand for."""
  packed = {n: quantise(w.swapaxes(1, 2), "mxfp4") for n, w in weights.items()}
  return packed, {n: q.dequantise(weights[n].dtype).swapaxes(1, 2) for n, q in packed.items()}


def quantised(arguments):
  """The arguments with MXFP4 weights, and with the same weights dequantised."""
  packed, plain = mxfp4({name: arguments[name] for name in WEIGHTS})
  return arguments | packed, arguments | plain


@every
@pytest.mark.parametrize("name", ["even", "fewer_than_a", "bfloat16"])
def test_quantised_experts_equal_their_dequantised_weights(name, backend):
  packed, plain = quantised(spec_named(name).arguments())
  packed_moe, plain_moe = (compiled(backend, each.pop("limit")) for each in (packed, plain))
  got, want = packed_moe(**packed), plain_moe(**plain)
  assert_close(got, want, TOLERANCE)  # the transpose may change the order of sums
  assert np.abs(want).max() > 0.1


@every
def test_only_experts_that_are_used_are_decoded(backend):
  spec = spec_named("empty_experts")
  arguments, _ = quantised(spec.arguments())
  limit = arguments.pop("limit")
  want = compiled(backend, limit)(**arguments)
  empty = np.asarray(expert_load(arguments["ids_NxA"], spec.experts)) == 0
  for name in WEIGHTS:
    q = arguments[name]
    scales = jnp.where(empty[:, None, None], jnp.uint8(255), q.scales)  # NaN
    arguments[name] = Quantised(q.codes, scales, q.format)
  assert empty.any()
  np.testing.assert_array_equal(compiled(backend, limit)(**arguments), want)


def test_quantised_experts_refuse_gradients():
  arguments, _ = quantised(spec_named("even").arguments())
  x = arguments.pop("x_NxD")
  with pytest.raises(ValueError, match="moe: quantised experts have no gradient"):
    jax.grad(lambda x: moe(x, **arguments, backend="xla").sum())(x)


def separated(arguments):
  """The arguments with an array for each expert."""
  return arguments | {name: Separate.of(arguments[name]) for name in WEIGHTS}


@every
@pytest.mark.parametrize(
  "name", ["even", "one_token", "fewer_than_a", "several_blocks", "bfloat16"]
)
def test_separate_experts_equal_stacked_ones(name, backend):
  arguments = spec_named(name).arguments()
  limit = arguments.pop("limit")
  for options in ({}, {"released_rounding": True})[: 1 + (name == "bfloat16")]:
    call = compiled(backend, limit, **options)
    want, got = call(**arguments), call(**separated(arguments))
    # Blocks of other sizes: products of one row and of several add in other orders.
    tolerance = TOLERANCE if arguments["x_NxD"].dtype == jnp.float32 else BFLOAT16_TOLERANCE
    assert_close(got, want, tolerance)
    assert np.abs(want).max() > 0.1


def test_separate_experts_of_another_dtype_are_cast_where_they_are_used():
  arguments = spec_named("bfloat16").arguments()
  limit = arguments.pop("limit")
  wide = separated({name: x.astype(jnp.float32) for name, x in arguments.items()})
  mixed = arguments | {name: wide[name] for name in WEIGHTS}
  call = compiled("xla", limit)
  np.testing.assert_array_equal(call(**mixed), call(**separated(arguments)))


def test_separate_experts_refuse_gradients():
  arguments = separated(spec_named("even").arguments())
  x = arguments.pop("x_NxD")
  with pytest.raises(ValueError, match="moe: separate experts have no gradient"):
    jax.grad(lambda x: moe(x, **arguments, backend="xla").sum())(x)


def released_in_float64(arguments, leave_out=None):
  """The steps of the released code, rounded by NumPy; one kind of rounding may be left out."""

  def bf16(x, step):
    return x if step == leave_out else x.astype(jnp.bfloat16).astype(np.float64)

  def fp8(x, step):
    if step == leave_out:
      return x
    return np.float64(oracle_dequantise(*oracle_quantise(np.float32(x), "fp8"), "fp8"))

  x, weights, w1, w3, w2 = (np.asarray(arguments[n], np.float64) for n in DIFFERENTIABLE)
  y = np.zeros(x.shape)
  x = fp8(x, "input")
  for (n, a), e in np.ndenumerate(np.asarray(arguments["ids_NxA"])):
    gate, up = bf16(x[n] @ w1[e], "gate"), bf16(x[n] @ w3[e], "up")
    inner = weights[n, a] * gate / (1 + np.exp(-gate)) * up
    inner = fp8(inner.astype(jnp.bfloat16).astype(np.float64), "inner")
    y[n] += bf16(inner @ w2[e], "output")
  return y


ROUNDED = ("input", "gate", "up", "inner", "output")


def rms(x):
  return np.sqrt(np.square(np.float64(x)).mean())


@every
def test_released_rounding_happens_where_the_released_code_has_it(backend):
  """Sums in another order flip a few roundings; a kind of rounding left out changes far more."""
  arguments = spec_named("bfloat16").arguments()
  want = released_in_float64(arguments)
  without = {step: rms(released_in_float64(arguments, step) - want) for step in ROUNDED}
  limit = arguments.pop("limit")
  got = compiled(backend, limit, released_rounding=True)(**arguments)
  assert got.dtype == jnp.float32
  error = rms(got - want)
  assert all(error < change / 3 for change in without.values()), (error, without)


def test_gradients_pass_straight_through_the_rounding():
  arguments = spec_named("bfloat16").arguments()
  want, got = (
    run(arguments, backend, released_rounding=True)[1] for backend in ("reference", "xla")
  )
  for name in DIFFERENTIABLE:
    assert_close(got[name], want[name], BFLOAT16_TOLERANCE, name)
    assert np.abs(np.asarray(got[name], np.float32)).max() > 0


@pytest.mark.parametrize(
  ("tokens", "active", "experts"), [(1, 3, 4), (2, 1, 13), (30, 4, 13), (211, 2, 4), (300, 1, 2)]
)
def test_blocks_cover_every_choice_once_and_few_rows_are_wasted(tokens, active, experts):
  run = jax.jit(make_plan, static_argnums=1)
  most = tuning.sizes("moe", "xla", tokens=tokens)["rows"]
  for seed in range(6):
    rng = np.random.default_rng(seed)
    ids = (experts * rng.random((tokens, active)) ** (1 + seed)).astype(np.int32) - seed % 2
    plan = jax.tree.map(np.asarray, run(ids, experts))
    used = (ids >= 0) & (ids < experts)
    np.testing.assert_array_equal(plan.used_NxA, used)
    seen, blocks = [], [(e, i) for e in plan.expert_E[: plan.runs] for i in range(plan.blocks(e))]
    for e, i in blocks:
      at = plan.block(e, i)
      assert 1 <= at.filled <= plan.rows
      assert at.first + plan.rows <= len(plan.choice_R)
      mine = plan.choice_R[at.first : at.first + at.filled]
      assert (ids.reshape(-1)[mine] == e).all()
      seen += mine.tolist()
    assert sorted(seen) == np.flatnonzero(used).tolist()
    np.testing.assert_array_equal(plan.choice_R[plan.row_NxA].reshape(-1), np.arange(ids.size))
    assert len(blocks) <= used.sum() // plan.rows + len(np.unique(ids[used]))
    assert plan.rows <= min(most, max(4, 2 * tokens * active / experts))


def test_swiglu_clamps_the_gate_above_only_and_up_on_both_sides():
  gate = jnp.array([-50.0, -3.0, 0.5, 3.0, 50.0], jnp.bfloat16)
  silu = lambda g: g / (1 + np.exp(-g))  # noqa: E731
  got = swiglu(gate, jnp.ones(5), limit=2.0)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, silu(np.array([-50.0, -3.0, 0.5, 2.0, 2.0])), rtol=1e-6)
  up = jnp.array([-9.0, -1.0, 1.0, 9.0])
  np.testing.assert_allclose(
    swiglu(jnp.ones(4), up, limit=2.0), silu(1.0) * np.array([-2, -1, 1, 2]), rtol=1e-6
  )
  np.testing.assert_allclose(swiglu(gate, jnp.full(5, 9.0), 0.0)[-1], 450, rtol=1e-6)


@pytest.mark.parametrize("limit", [-1.0, np.nan, None, "7"])
def test_limits_that_are_none_are_refused(limit):
  arguments = spec_named("one_token").arguments() | {"limit": limit}
  with pytest.raises(ValueError, match=r"limit: is .*; must be a finite number from 0 up"):
    moe(**arguments)


# --- Balance -----------------------------------------------------------------------------------

balance_loss = jax.jit(sequence_balance_loss)


def test_load_counts_choices_and_ignores_no_expert():
  ids = np.random.default_rng(0).integers(-1, 7, (3, 50, 4))
  got = expert_load(jnp.asarray(ids), 8)
  np.testing.assert_array_equal(got, np.bincount(ids[ids >= 0], minlength=8))
  assert got.dtype == jnp.int32
  assert (ids < 0).any()


def balance_in_float64(scores, ids, valid):
  total = 0.0
  for scores_s, ids_s, valid_s in zip(np.float64(scores), ids, valid, strict=True):
    tokens, experts = valid_s.sum(), scores.shape[-1]
    if not tokens:
      continue
    for e in range(experts):
      count = (ids_s[valid_s] == e).sum()
      f = experts / (ids.shape[-1] * tokens) * count
      share = [s[e] / s.sum() for s in scores_s[valid_s]]
      total += f * np.sum(share) / tokens
  return total / len(scores)


def balance_arguments():
  rng = np.random.default_rng(0)
  scores = rng.uniform(0.01, 1, (3, 20, 6)).astype(np.float32)
  ids = np.argsort(-scores, axis=-1)[..., :2].astype(np.int32)
  valid = np.arange(20) < np.array([[20], [7], [0]])
  return scores, ids, valid


def test_balance_loss_equals_its_definition():
  scores, ids, valid = balance_arguments()
  got = balance_loss(scores, ids, valid)
  np.testing.assert_allclose(got, balance_in_float64(scores, ids, valid), rtol=1e-6)
  elsewhere = np.where(valid[..., None], ids, 5), np.where(valid[..., None], scores, 9.0)
  np.testing.assert_array_equal(balance_loss(elsewhere[1], elsewhere[0], valid), got)


def test_balance_loss_gradient_passes_through_the_scores_alone():
  scores, ids, valid = balance_arguments()
  grad = np.asarray(jax.jit(jax.grad(sequence_balance_loss))(scores, ids, valid), np.float64)
  np.testing.assert_array_equal(grad[~valid], 0)
  direction = np.random.default_rng(1).normal(size=scores.shape)
  ahead, behind = (
    balance_in_float64(np.float64(scores) + h * direction, ids, valid) for h in (1e-6, -1e-6)
  )
  np.testing.assert_allclose((grad * direction).sum(), (ahead - behind) / 2e-6, rtol=1e-4)


def test_balance_loss_is_one_when_even_and_grows_when_not():
  scores = jnp.ones((2, 12, 4))
  even = jnp.broadcast_to(jnp.arange(12)[:, None] % 4, (2, 12, 1))
  valid = jnp.ones((2, 12), bool)
  np.testing.assert_allclose(balance_loss(scores, even, valid), 1, rtol=1e-6)
  starving = balance_loss(scores.at[..., 0].set(9.0), jnp.zeros_like(even), valid)
  np.testing.assert_allclose(starving, 4 * 9 / 12, rtol=1e-6)
