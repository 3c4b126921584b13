"""The codecs and block quantisers against float64 NumPy that shares no code with them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats_oracle import (
  BLOCK,
  ELEMENT_SCALE,
  VALUES,
  nearest_code,
  oracle_dequantise,
  oracle_quantise,
)
from hysparse_kernels.formats import (
  dequantise_blocks,
  e2m1,
  e4m3,
  e8m0,
  fake_quant,
  quantise_blocks,
  round_to,
)

from hysparse.config import Format

CODECS = {"e2m1": e2m1, "e4m3": e4m3}
codecs = pytest.mark.parametrize("name", CODECS)
packed = pytest.mark.parametrize("format", BLOCK)

quantised = jax.jit(quantise_blocks, static_argnums=1)
dequantised = jax.jit(dequantise_blocks, static_argnums=2)
faked = jax.jit(fake_quant, static_argnums=1)

TINY = np.float32(2.0**-149)  # smallest subnormal


def neighbours(values):
  """float32 values with both neighbours of each, and all of them negated."""
  values = np.asarray(values, np.float32)
  with np.errstate(over="ignore"):
    above, below = (np.nextafter(values, np.float32(end)) for end in (np.inf, 0))
  near = np.concatenate([values, above, below])
  return np.concatenate([near, -near])


def hard_values(name):
  """Every code and every tie of a format with neighbours, and what lies outside of it."""
  values = np.sort(VALUES[name][np.isfinite(VALUES[name])])
  ties = (values[1:] + values[:-1]) / 2
  outside = [0.0, TINY, 2.0**-126, 448.5, 464.0, 480.0, 1e30, np.finfo(np.float32).max, np.inf]
  random = np.exp(np.random.default_rng(0).uniform(-12, 8, 4000))
  return neighbours(np.concatenate([values, ties, outside, random]))


def assert_same_bits(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype == np.float32
  np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@codecs
def test_every_code_decodes_and_encodes_to_itself(name):
  codes = np.arange(len(VALUES[name]), dtype=np.uint8)
  values = np.asarray(jax.jit(CODECS[name].decode)(codes))
  np.testing.assert_array_equal(values, VALUES[name])  # a NaN equals a NaN here
  np.testing.assert_array_equal(np.signbit(values), codes >= len(codes) // 2)
  finite = np.isfinite(values)
  np.testing.assert_array_equal(jax.jit(CODECS[name].encode)(values)[finite], codes[finite])


@codecs
def test_rounding_is_to_nearest_with_ties_to_even_and_saturates(name):
  x = hard_values(name)
  want = nearest_code(name, x)
  np.testing.assert_array_equal(jax.jit(CODECS[name].encode)(x), want)
  assert_same_bits(jax.jit(CODECS[name].round)(x), np.float32(VALUES[name][want]))
  assert want.max() < len(VALUES[name]) and len(set(want)) == np.isfinite(VALUES[name]).sum()


def test_the_ties_of_the_published_code_and_the_zeros():
  ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
  np.testing.assert_array_equal(e2m1.round(ties), [0, 1, 1, 2, 2, 4, 4])
  np.testing.assert_array_equal(e2m1.encode(np.float32([0.0, -0.0, -0.1])), [0, 8, 8])
  np.testing.assert_array_equal(e4m3.encode(np.float32([0.0, -0.0])), [0, 128])


def test_nan_has_codes_in_e4m3_only():
  nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
  np.testing.assert_array_equal(jax.jit(e4m3.encode)(nans), [0x7F, 0xFF, 0x7F])
  assert np.isnan(e4m3.decode(np.uint8([0x7F, 0xFF]))).all()
  for codec in (e4m3, e2m1):
    assert np.isnan(jax.jit(codec.round)(nans)).all()
  np.testing.assert_array_equal(jax.jit(e2m1.encode)(nans), [7, 15, 7])


def test_every_power_of_two_decodes_and_encodes_upwards():
  codes = np.arange(256, dtype=np.uint8)
  values = np.asarray(jax.jit(e8m0.decode)(codes))
  assert_same_bits(values[:255], np.ldexp(1.0, np.arange(255) - 127).astype(np.float32))
  assert np.isnan(values[255])
  np.testing.assert_array_equal(jax.jit(e8m0.encode)(values), codes)
  above = np.nextafter(values[:255], np.float32(np.inf))
  np.testing.assert_array_equal(jax.jit(e8m0.encode)(above), codes[1:])
  below = np.nextafter(values[1:255], np.float32(0))
  np.testing.assert_array_equal(jax.jit(e8m0.encode)(below), codes[1:255])


def test_what_is_no_power_of_two_is_nan_in_e8m0():
  x = np.float32([0.0, -0.0, TINY, np.inf, -np.inf, np.nan, -1.0, 3e38])
  np.testing.assert_array_equal(jax.jit(e8m0.encode)(x), [0, 0, 0, 255, 255, 255, 255, 255])


@pytest.mark.parametrize("name", CODECS)
def test_a_product_with_any_power_of_two_is_exact_where_it_is_normal(name):
  """The smallest one, 2^-127, is no normal number itself."""
  codes = np.arange(256, dtype=np.uint8)
  values = VALUES[name].astype(np.float32)
  got = np.asarray(jax.jit(e8m0.multiply)(values[:, None], codes))
  with np.errstate(over="ignore"):
    want = np.float64(values[:, None]) * np.ldexp(1.0, codes.astype(int) - 127)
    want = np.where(codes == 255, np.nan, want).astype(np.float32)
  normal = ~(np.abs(want) < 2.0**-126) | (want == 0)
  assert normal[:, 0].sum() > 4, "no normal product with 2^-127"
  np.testing.assert_array_equal(got[normal], want[normal])


def blocks_of(format):
  """[rows, block]: magnitudes of all sizes, amax at every edge of the scale, specials."""
  rng = np.random.default_rng(3)
  n, largest, floor = BLOCK[format], *ELEMENT_SCALE[format]
  wide = rng.normal(size=(600, n)) * np.exp(rng.uniform(-95, 85, (600, 1)))
  usual = rng.normal(size=(600, n)) * np.exp(rng.uniform(-6, 4, (600, 1)))
  scales = VALUES["e4m3"] if format == "fp4" else np.ldexp(1.0, np.arange(-126, 119))
  scales = np.sort(scales[scales > 0])
  edges = neighbours(
    np.concatenate([largest * scales, largest * (scales[1:] + scales[:-1]) / 2, [floor]])
  )
  edged = rng.uniform(-1, 1, (len(edges), n)) * np.abs(edges)[:, None]
  edged[:, n // 2] = edges
  # Values on the ties of the codes under a scale that the largest value sets.
  on_ties = np.resize(np.arange(1, 25) / 4, (len(scales), n)) * scales[:, None]
  on_ties[:, 1] = largest * scales
  special = np.zeros((6, n))
  special[1], special[2, 3], special[3, 0] = -0.0, TINY, 0.9 * 2.0**-126
  special[4] = np.linspace(-1, 1, n) * 2.0**-126
  special[5, :3] = np.finfo(np.float32).max, -np.finfo(np.float32).max, 1.0
  with np.errstate(over="ignore"):
    rows = np.concatenate([wide, usual, edged, on_ties, special]).astype(np.float32)
  return rows[np.isfinite(rows).all(1)]


@packed
def test_blocks_quantise_to_the_bit(format):
  x = blocks_of(format)
  codes, scales = quantised(x, format)
  want_codes, want_scales = oracle_quantise(x, format)
  np.testing.assert_array_equal(scales, want_scales)
  np.testing.assert_array_equal(codes, want_codes)
  want = oracle_dequantise(want_codes, want_scales, format)
  normal = ~(np.abs(want) < 2.0**-126) | (want == 0)
  assert normal.mean() > 0.9
  np.testing.assert_array_equal(
    np.asarray(dequantised(codes, scales, format))[normal], want[normal]
  )
  np.testing.assert_array_equal(np.asarray(faked(x, format))[normal], want[normal])


@packed
def test_each_block_has_its_own_scale_and_the_last_may_be_short(format):
  rng = np.random.default_rng(0)
  for width in (1, BLOCK[format] - 1, BLOCK[format] + 5, 3 * BLOCK[format]):
    x = rng.normal(size=(2, 3, width)).astype(np.float32)
    x *= np.float32(4.0) ** (np.arange(width) // BLOCK[format])
    codes, scales = quantised(x, format)
    assert codes.dtype == scales.dtype == jnp.uint8
    assert codes.shape == x.shape
    assert scales.shape == (2, 3, -(-width // BLOCK[format]))
    want_codes, want_scales = oracle_quantise(x, format)
    np.testing.assert_array_equal(codes, want_codes)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(
      faked(x, format), oracle_dequantise(want_codes, want_scales, format)
    )


@packed
def test_a_nan_poisons_its_block_and_no_other(format):
  n = BLOCK[format]
  x = np.ones((2, 3 * n), np.float32)
  x[0, n + 1], x[1, 2 * n] = np.nan, -np.nan
  want = np.zeros(x.shape, bool)
  want[0, n : 2 * n] = want[1, 2 * n :] = True
  np.testing.assert_array_equal(np.isnan(faked(x, format)), want)
  np.testing.assert_array_equal(np.isnan(dequantised(*quantised(x, format), format)), want)


@packed
def test_an_infinity_saturates_under_an_e4m3_scale_and_poisons_under_e8m0(format):
  x = np.full(2 * BLOCK[format], 1.5, np.float32)
  x[1] = -np.inf
  y = np.asarray(faked(x, format))
  np.testing.assert_array_equal(y, dequantised(*quantised(x, format), format))
  np.testing.assert_array_equal(y[BLOCK[format] :], 1.5)
  if format == "fp4":
    assert y[1] == -6 * 448 and (y[2 : BLOCK[format]] == 0).all()
  else:
    assert np.isnan(y[: BLOCK[format]]).all()


def test_values_are_divided_by_the_scale():
  """A product with the reciprocal would land beside a tie and give another code."""
  scales = VALUES["e4m3"][1:127].astype(np.float32)
  ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  x = np.zeros((len(scales), 16), np.float32)
  x[:, : len(ties)] = ties * scales[:, None]
  x[:, 15] = 6 * scales
  codes, got_scales = quantised(x, "fp4")
  np.testing.assert_array_equal(got_scales[:, 0], np.arange(1, 127))
  divided = nearest_code("e2m1", x / scales[:, None])
  multiplied = nearest_code("e2m1", x * (1 / scales)[:, None])
  assert (divided != multiplied).any(), "the two agree on these inputs"
  np.testing.assert_array_equal(codes, divided)


def test_the_largest_value_is_divided_by_six():
  """XLA makes a product with 1/6 out of a division by a constant, which rounds differently."""
  values = np.sort(VALUES["e4m3"][VALUES["e4m3"] > 0])
  amax = np.abs(neighbours(6 * (values[1:] + values[:-1]) / 2))
  divided = nearest_code("e4m3", amax / np.float32(6))
  multiplied = nearest_code("e4m3", amax * np.float32(1 / 6))
  assert (divided != multiplied).any(), "the two agree on these inputs"
  scales = quantised(np.repeat(amax[:, None], 16, 1), "fp4").scales[:, 0]
  np.testing.assert_array_equal(scales, divided)


def test_plain_formats_keep_or_round_the_values():
  x = hard_values("e4m3")
  assert_same_bits(faked(x, "f32"), x)
  with np.errstate(over="ignore"):
    want = x.astype(jnp.bfloat16).astype(np.float32)
  normal = ~(np.abs(x) < 2.0**-126)
  assert_same_bits(np.asarray(faked(x, "bf16"))[normal], want[normal])
  assert_same_bits(round_to(jnp.asarray(x), jnp.float32), x)


@pytest.mark.parametrize("format", Format.__args__)
def test_fake_quantisation_keeps_the_dtype_and_passes_gradients_through(format):
  rng = np.random.default_rng(0)
  for dtype in (jnp.float32, jnp.bfloat16):
    x = jnp.asarray(rng.normal(size=(3, 40)), dtype)
    cotangent = jnp.asarray(rng.normal(size=(3, 40)), dtype)
    y, pull = jax.vjp(lambda x: faked(x, format), x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(pull(cotangent)[0], cotangent)
    np.testing.assert_array_equal(y, faked(x.astype(jnp.float32), format).astype(dtype))
    np.testing.assert_array_equal(y, jax.vmap(lambda row: fake_quant(row, format))(x))
    assert format in ("f32", "bf16") or (y != x).any()


def test_quantised_values_are_exact_in_bfloat16():
  for format, seed in itertools.product(BLOCK, range(3)):
    x = np.random.default_rng(seed).normal(size=(50, 64)).astype(np.float32)
    blocks = quantised(x, format)
    narrow = dequantise_blocks(*blocks, format, jnp.bfloat16)
    np.testing.assert_array_equal(narrow.astype(jnp.float32), dequantised(*blocks, format))


def test_an_unknown_format_is_refused_by_name():
  x = jnp.ones(16)
  with pytest.raises(ValueError, match="format: is 'fp5'; must be fp4, mxfp4, fp8"):
    fake_quant(x, "fp5")
  with pytest.raises(ValueError, match="format: is 'bf16'; must be fp4, mxfp4, fp8"):
    quantise_blocks(x, "bf16")
