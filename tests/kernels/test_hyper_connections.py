"""Residual streams: every backend against float64 written from the text, values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels import compat
from hysparse_kernels.hyper_connections import advance, coefficients, fold, update
from hysparse_kernels.hyper_connections.specs import SPECS

# Up to 20 normalisations in float32, each rounding once; tight enough that no eps (1e-6) gets lost.
TOLERANCE = 2e-6
# Hard mixes have sums near eps, where the normalisation amplifies the rounding of the logits.
HARD_MIX_TOLERANCE = 2e-4
# Gradients pass the 20 normalisations once more.
GRADIENT_TOLERANCE = 1e-5
HARD_MIX_GRADIENT_TOLERANCE = 2e-3
# Each column's sum is divided by itself plus eps (1e-6).
COLUMN_TOLERANCE = 3e-6
# One bfloat16 rounding of the result.
BFLOAT16_TOLERANCE = 2**-7

by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
both = pytest.mark.parametrize("backend", ["reference", "xla"])


def coefficients_in_float64(x_NxMxD, fn_QxP, base_Q, scale_3, iters, eps, norm_eps):
  x, fn, base, scale = (np.asarray(a, np.float64) for a in (x_NxMxD, fn_QxP, base_Q, scale_3))
  tokens, streams, _ = x.shape
  pre, post = np.zeros((2, tokens, streams))
  comb = np.zeros((tokens, streams, streams))
  for n in range(tokens):
    flat = x[n].reshape(-1)
    mixes = fn @ flat / np.sqrt((flat**2).mean() + norm_eps)
    a, b, c = np.split(mixes, [streams, 2 * streams])
    base_a, base_b, base_c = np.split(base, [streams, 2 * streams])
    pre[n] = 1 / (1 + np.exp(-(a * scale[0] + base_a))) + eps
    post[n] = 2 / (1 + np.exp(-(b * scale[1] + base_b)))
    logits = (c * scale[2] + base_c).reshape(streams, streams)
    soft = np.exp(logits - logits.max(axis=1, keepdims=True))
    mix = soft / soft.sum(axis=1, keepdims=True) + eps
    mix = mix / (mix.sum(axis=0, keepdims=True) + eps)
    for _ in range(iters - 1):
      mix = mix / (mix.sum(axis=1, keepdims=True) + eps)
      mix = mix / (mix.sum(axis=0, keepdims=True) + eps)
    comb[n] = mix
  return pre, post, comb


def mix_arguments(spec):
  """The arguments of `update`."""
  return select(spec, "x_NxMxD", "y_NxD", "post_NxM", "comb_NxMxM")


def select(spec, *names):
  arguments = spec.arguments()
  return {name: arguments[name] for name in names}


def assert_close(got, want, tolerance, name=""):
  """`tolerance` is relative to the largest value."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  limit = tolerance * np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=name)


def split(spec):
  """The arrays of `coefficients`, and the numbers that are static when it is compiled."""
  arguments = select(spec, "x_NxMxD", "fn_QxP", "base_Q", "scale_3")
  return arguments, select(spec, "iters", "eps", "norm_eps")


@functools.cache
def compiled(function, backend, **static):
  """Compiled once for all tests that call it with the same shapes."""
  return jax.jit(functools.partial(function, backend=backend, **static))


@functools.cache
def compiled_with_gradients(function, backend, **static):
  """(gradients of sum(output * cotangent) to all arguments, the outputs)."""

  def loss(arguments, cotangents):
    outputs = function(**arguments, backend=backend, **static)
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents), strict=True)
    return sum(jnp.sum(o.astype(jnp.float32) * c) for o, c in pairs), outputs

  return jax.jit(jax.grad(loss, has_aux=True))


def directional(function, arguments, name, direction, cotangents, step):
  """Central difference in float64 of sum(output * cotangent) along a direction."""
  values = []
  for h in (step, -step):
    moved = np.asarray(arguments[name], np.float64) + h * direction
    outputs = function(**(arguments | {name: moved}))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    values.append(sum((o * c).sum() for o, c in zip(outputs, cotangents, strict=True)))
  return (values[0] - values[1]) / (2 * step)


# --- Coefficients --------------------------------------------------------------------------------


def random_cotangents(spec, seed=1):
  rng = np.random.default_rng(seed)
  shapes = [(spec.tokens, spec.streams)] * 2 + [(spec.tokens, spec.streams, spec.streams)]
  return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@by_name
@both
def test_coefficients_equal_float64(spec, backend):
  arguments, static = split(spec)
  step = compiled_with_gradients(coefficients, backend, **static)
  _, got = step(arguments, random_cotangents(spec))
  want = coefficients_in_float64(**arguments, **static)
  tolerance = HARD_MIX_TOLERANCE if spec.mix_scale > 1 else TOLERANCE
  for name, a, b in zip(got._fields, got, want, strict=True):
    assert a.dtype == jnp.float32
    assert_close(a, b, tolerance, name)


@by_name
def test_coefficient_gradients_agree(spec):
  arguments, static = split(spec)
  want, got = (
    compiled_with_gradients(coefficients, backend, **static)(arguments, random_cotangents(spec))[0]
    for backend in ("reference", "xla")
  )
  tolerance = HARD_MIX_GRADIENT_TOLERANCE if spec.mix_scale > 1 else GRADIENT_TOLERANCE
  tolerance = max(tolerance, BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else 0)
  for name in arguments:
    assert got[name].dtype == arguments[name].dtype
    assert_close(got[name], want[name], tolerance, name)


@both
def test_coefficient_gradients_equal_finite_differences(backend):
  spec = next(s for s in SPECS if s.name == "odd_sizes")
  (arguments, static), cotangents = split(spec), random_cotangents(spec)
  got, _ = compiled_with_gradients(coefficients, backend, **static)(arguments, cotangents)
  oracle = functools.partial(coefficients_in_float64, **static)
  rng = np.random.default_rng(2)
  for name, grad in got.items():
    direction = rng.normal(size=grad.shape)
    slope = directional(oracle, arguments, name, direction, cotangents, step=1e-5)
    size = np.linalg.norm(grad) * np.linalg.norm(direction)
    assert abs(slope - (np.asarray(grad, np.float64) * direction).sum()) < GRADIENT_TOLERANCE * size


@both
def test_comb_ends_on_columns_and_its_rows_converge(backend):
  distances = []
  for spec in (SPECS[0], dataclasses.replace(SPECS[0], iters=20)):
    arguments, static = split(spec)
    comb = compiled(coefficients, backend, **static)(**arguments).comb_NxMxM
    np.testing.assert_allclose(comb.sum(1), 1, atol=COLUMN_TOLERANCE)
    distances.append(np.abs(comb.sum(2) - 1).max())
  assert COLUMN_TOLERANCE < distances[1] < distances[0] / 2


@both
def test_a_closed_pre_leaves_eps_and_a_closed_post_nothing(backend):
  arguments, static = split(SPECS[0])
  arguments["base_Q"] = arguments["base_Q"].at[:8].set(-200.0)
  got = compiled(coefficients, backend, **static)(**arguments)
  np.testing.assert_array_equal(got.pre_NxM, np.float32(static["eps"]))
  np.testing.assert_array_equal(got.post_NxM, 0)


@both
def test_coefficients_ignore_the_size_of_the_streams(backend):
  """The statistic is of all channels of all streams: one common factor drops out."""
  arguments, static = split(SPECS[0])
  run = compiled(coefficients, backend, **static)
  x, want = arguments["x_NxMxD"], run(**arguments)
  for a, b in zip(run(**(arguments | {"x_NxMxD": x * 64})), want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  other = run(**(arguments | {"x_NxMxD": x.at[:, 1].multiply(2)}))
  assert np.abs(other.pre_NxM - want.pre_NxM).max() > 1e-3


@both
def test_zero_streams_are_finite_forward_and_backward(backend):
  arguments, static = split(SPECS[0])
  arguments["x_NxMxD"] = jnp.zeros_like(arguments["x_NxMxD"])
  step = compiled_with_gradients(coefficients, backend, **static)
  grads, got = step(arguments, random_cotangents(SPECS[0]))
  base = np.asarray(arguments["base_Q"][:4], np.float64)
  np.testing.assert_allclose(got.pre_NxM[0], 1 / (1 + np.exp(-base)), rtol=1e-5)
  for grad in grads.values():
    assert np.isfinite(grad).all()


def test_the_compiled_program_does_not_grow_with_the_iterations():
  def size(iters):
    arguments, static = split(dataclasses.replace(SPECS[0], iters=iters))
    run = compiled_with_gradients(coefficients, "xla", **static)
    return len(run.lower(arguments, random_cotangents(SPECS[0])).as_text().splitlines())

  assert size(3) == size(30)


def test_bad_parameters_are_refused_by_name():
  arrays, static = split(SPECS[0])
  arguments = arrays | static
  with pytest.raises(ValueError, match=r"base_Q: has shape \[23\]; must be \[24\]"):
    coefficients(**(arguments | {"base_Q": arguments["base_Q"][:-1]}))
  other = {"fn_QxP": arguments["fn_QxP"][:23], "base_Q": arguments["base_Q"][:23]}
  with pytest.raises(ValueError, match=r"fn_QxP: has shape \[23, 64\]; must be \[24, 64\] for 4"):
    coefficients(**(arguments | other))
  for iters in (0, 2.5, True):
    with pytest.raises(ValueError, match=r"iters: is .*; must be a whole number from 1 up"):
      coefficients(**(arguments | {"iters": iters}))


# --- Fold and update ---------------------------------------------------------------------------


def mix(x_NxMxD, y_NxD, post_NxM, comb_NxMxM, backend):
  """Both operations, the fold with `post` as its weights."""
  return {
    "fold": fold(x_NxMxD, post_NxM, backend=backend),
    "update": update(x_NxMxD, y_NxD, post_NxM, comb_NxMxM, backend=backend),
  }


@by_name
@both
def test_fold_and_update_equal_float64_with_their_gradients(spec, backend):
  """Both are linear in every argument: their gradients are short sums."""
  arguments = mix_arguments(spec)
  x, y, post, comb = (np.asarray(a, np.float64) for a in arguments.values())
  rng = np.random.default_rng(1)
  cotangents = {
    "fold": rng.normal(size=y.shape).astype(np.float32),
    "update": rng.normal(size=x.shape).astype(np.float32),
  }
  u, g = (cotangents[name].astype(np.float64) for name in ("fold", "update"))
  grads, outputs = compiled_with_gradients(mix, backend)(arguments, cotangents)

  mixed = np.zeros_like(x)
  for i, j in np.ndindex(comb.shape[1:]):
    mixed[:, j] += comb[:, i, j, None] * x[:, i]
  want = {
    "fold": (post[..., None] * x).sum(1),
    "update": post[..., None] * y[:, None] + mixed,
  }
  bfloat16 = spec.dtype == "bfloat16"
  for name, got in outputs.items():
    assert got.dtype == spec.dtype
    assert_close(got, want[name], BFLOAT16_TOLERANCE if bfloat16 else TOLERANCE, name)

  want = {
    "x_NxMxD": np.einsum("nij,njd->nid", comb, g) + post[..., None] * u[:, None],
    "y_NxD": np.einsum("nj,njd->nd", post, g),
    "post_NxM": np.einsum("nd,njd->nj", y, g) + np.einsum("nd,nmd->nm", u, x),
    "comb_NxMxM": np.einsum("nid,njd->nij", x, g),
  }
  for name, got in grads.items():
    assert got.dtype == arguments[name].dtype
    # The cotangent that reaches a bfloat16 result is itself rounded to bfloat16.
    assert_close(got, want[name], BFLOAT16_TOLERANCE if bfloat16 else GRADIENT_TOLERANCE, name)


@both
def test_columns_of_comb_are_what_keeps_equal_streams(backend):
  """With post 0 equal streams come out as they went in, and only because COLUMNS sum to 1."""
  arguments, static = split(SPECS[0])
  x = jnp.broadcast_to(arguments["x_NxMxD"][:, :1], arguments["x_NxMxD"].shape)
  comb = compiled(coefficients, backend, **static)(**arguments).comb_NxMxM
  mix = {"x_NxMxD": x, "y_NxD": x[:, 0], "post_NxM": jnp.zeros(x.shape[:2])}
  run = compiled(update, backend)
  np.testing.assert_allclose(run(**mix, comb_NxMxM=comb), x, atol=1e-5)
  assert np.abs(run(**mix, comb_NxMxM=comb.swapaxes(1, 2)) - x).max() > 1e-3


# --- All in one pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas_tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["streams", "bfloat16"])
def test_advancing_and_its_gradients_equal_the_three_parts(name, backend):
  spec = next(s for s in SPECS if s.name == name)
  static = select(spec, "iters", "eps", "norm_eps")
  arguments = {k: v for k, v in spec.arguments().items() if k not in static}
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(functools.partial(advance, **static), **arguments)
  cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
  with compat.target("tpu" if backend == "pallas_tpu" else "cpu", interpret=True):
    got = compiled_with_gradients(advance, backend, **static)(arguments, cotangents)
  want = compiled_with_gradients(advance, "reference", **static)(arguments, cotangents)
  tolerance = BFLOAT16_TOLERANCE if spec.dtype == "bfloat16" else GRADIENT_TOLERANCE
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    assert_close(a, b, tolerance)


@pytest.mark.parametrize("function", [coefficients, fold, update], ids=lambda f: f.__name__)
def test_gradients_of_single_kernels_equal_the_reference(function):
  spec = SPECS[0]
  static = select(spec, "iters", "eps", "norm_eps") if function is coefficients else {}
  names = {coefficients: ("x_NxMxD", "fn_QxP", "base_Q", "scale_3"), fold: ("x_NxMxD", "pre_NxM")}
  arguments = select(spec, *names[function]) if function in names else mix_arguments(spec)
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(functools.partial(function, **static), **arguments)
  cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
  with compat.target("tpu", interpret=True):
    got, _ = compiled_with_gradients(function, "pallas_tpu", **static)(arguments, cotangents)
  want, _ = compiled_with_gradients(function, "reference", **static)(arguments, cotangents)
  for name in arguments:
    assert_close(got[name], want[name], GRADIENT_TOLERANCE, name)
