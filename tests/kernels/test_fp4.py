"""Quantising and packing in integers: the bits of the codecs, wherever values are close to a tie.

The kernels are compared in test_backends.py, on the same specs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats_oracle import BLOCK, ELEMENT, VALUES, oracle_quantise
from hysparse_kernels import fp4
from hysparse_kernels.dispatch import BackendError
from hysparse_kernels.fp4 import integers, specs
from test_backends import same

FORMATS = tuple(BLOCK)


@functools.partial(jax.jit, static_argnums=1)
def in_integers(x, format):
  """(codes, scales) of whole blocks."""
  bits = integers.bits_of(x).reshape(*x.shape[:-1], -1, BLOCK[format])
  scales = integers.scale_codes(integers.magnitude(bits).max(-1), format)
  return integers.codes(bits, scales[..., None], format).reshape(x.shape), scales


def check(x, format):
  codes, scales = in_integers(x, format)
  want_codes, want_scales = oracle_quantise(x, format)
  np.testing.assert_array_equal(scales, want_scales)
  np.testing.assert_array_equal(codes, want_codes)


def near(x):
  """Values, those next to them, and all of these negated; in blocks of 4 x as many."""
  bits = np.float32(x).view(np.int32)[..., None] + np.array([-1, 0, 1])
  around = np.maximum(bits, 0).astype(np.int32).view(np.float32)
  return np.stack([around, -around], axis=-1).reshape(-1)


def scales_of(format):
  """Some scales of a format, from its smallest one up."""
  if format == "fp4":
    return VALUES["e4m3"][1:127]
  low = {"mxfp4": -126, "fp8": -22}[format]
  return 2.0 ** np.r_[low : low + 6, -9:9, 117:119]


@pytest.mark.parametrize("format", FORMATS)
def test_values_next_to_the_middle_between_two_codes(format):
  values = VALUES[ELEMENT[format]]
  positive = values[: len(values) // 2]
  positive = positive[np.isfinite(positive)]
  middles, block = (positive[1:] + positive[:-1]) / 2, BLOCK[format]
  rows = []
  for scale in scales_of(format):
    x = near(middles * scale)
    x = np.pad(x, (0, -len(x) % (block - 1))).reshape(-1, block - 1)
    rows.append(np.insert(x, 0, np.float32(positive[-1] * scale), axis=1))
  check(np.float32(np.concatenate(rows)), format)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_whose_largest_value_is_next_to_the_middle_between_two_scales(format):
  scales, block = np.float64(scales_of(format)), BLOCK[format]
  edges = np.concatenate([scales, (scales[1:] + scales[:-1]) / 2])
  largest = near(edges * {"e2m1": 6, "e4m3": 448}[ELEMENT[format]])
  rng = np.random.default_rng(0)
  check(np.float32(largest[:, None] * np.insert(rng.random(block - 1), 0, 1)), format)


@pytest.mark.parametrize("format", FORMATS)
def test_any_finite_values(format):
  rng = np.random.default_rng(1)
  exponent = rng.integers(0, 255, (4096, 1)) - rng.integers(0, 12, (4096, BLOCK[format]))
  mantissa = rng.integers(0, 2**23, exponent.shape) & -1 << rng.integers(0, 24, exponent.shape)
  bits = rng.integers(0, 2, exponent.shape) << 31 | np.maximum(exponent, 0) << 23 | mantissa
  check(bits.astype(np.uint32).view(np.float32), format)


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_xla_equals_the_reference(spec):
  run = jax.jit(specs.call, static_argnums=1)
  jax.tree.map(same, run(spec.arguments(), "xla"), run(spec.arguments(), "reference"))


def test_the_specs_hold_what_is_special():
  x = np.concatenate([np.ravel(spec.arguments()["x"]).astype(np.float32) for spec in specs.SPECS])
  tiny = np.finfo(np.float32).tiny
  for special in (np.isnan(x), np.isposinf(x), np.isneginf(x), (x != 0) & (np.abs(x) < tiny)):
    assert special.sum() > 5
  assert (np.signbit(x) & (x == 0)).sum() > 50


def test_a_backend_that_there_is_not_is_named():
  with pytest.raises(BackendError, match=r"fp4.pack: no backend 'tritno'; it has auto, reference"):
    fp4.pack(jnp.zeros((1, 32)), "fp4", backend="tritno")
