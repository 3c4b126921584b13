"""Stored rows decode to what fake quantisation gives, bit for bit, whatever is stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels.formats import EvenColumnLow, Stored, fake_quant, quantise_blocks

from hysparse.cache.layout import stored_row

FORMATS = ("fp4", "mxfp4", "fp8", "bf16", "f32")
PACKED = FORMATS[:3]
WIDTHS = (1, 17, 33, 40)  # blocks are of 16 and 32 channels
ROWS = 48


def rows(width):
  """[ROWS, width] float32 of every magnitude; zeros, subnormals, infinities and NaN among them."""
  rng = np.random.default_rng(width)
  normal = rng.normal(size=(ROWS, width))
  with np.errstate(over="ignore", under="ignore"):
    x = np.float32(normal * 10.0 ** np.linspace(-44, 37, ROWS)[:, None])
    x[20:24] = np.float32(rng.integers(-12, 13, (4, width)) / 2)  # ties of the codes
  x[0], x[1], x[2] = 0.0, -0.0, np.float32(2.0**-149)
  for row, special in ((3, np.nan), (4, np.inf), (5, -np.inf), (6, np.finfo(np.float32).max)):
    x[row] = normal[row]
    x[row, row % width] = special
  return x


@functools.partial(jax.jit, static_argnums=1)
def stored(xs, format):
  """Of each x: as it is stored, and what fake quantisation makes of it."""
  return [(Stored.of(x, format), Stored.of(x, format).decode(), fake_quant(x, format)) for x in xs]


decoded = jax.jit(Stored.decode)
quantised = jax.jit(quantise_blocks, static_argnums=1)


@functools.cache
def every_width(format):
  return stored([jnp.asarray(rows(width)) for width in WIDTHS], format)


def assert_same(got, want):
  """The same bits; any NaN is like another."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype
  nan = np.isnan(want.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
  bits = f"uint{8 * got.itemsize}"
  np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_gives_the_fake_quantised_values(format):
  for kept, decoded, faked in every_width(format):
    assert_same(decoded, faked)
    assert kept.shape == decoded.shape


@pytest.mark.parametrize("format", FORMATS)
def test_the_arrays_are_those_of_the_layout(format):
  for width, (kept, _, _) in zip(WIDTHS, every_width(format), strict=True):
    described = {p.name: ((ROWS, *p.shape), p.dtype) for p in stored_row(format, width)}
    assert {n: (x.shape, x.dtype.name) for n, x in kept.parts.items()} == described


@pytest.mark.parametrize("format", FORMATS)
def test_bfloat16_rows_and_values_are_exact(format):
  x = jnp.asarray(rows(40)).astype(jnp.bfloat16)

  @jax.jit
  def both(x):
    kept = Stored.of(x, format)
    return kept.decode(jnp.bfloat16), kept.decode(), fake_quant(x, format)

  narrow, wide, faked = both(x)
  assert faked.dtype == jnp.bfloat16
  assert_same(narrow, faked)
  assert_same(np.asarray(wide).astype(faked.dtype), faked)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_stored_alike_alone_and_among_others(format):
  width = 33
  x = jnp.asarray(rows(width))
  kept = every_width(format)[WIDTHS.index(width)][0]
  halves = stored([x[5:9], x.reshape(4, -1, width)], format)
  for name, part in kept.parts.items():
    assert_same(halves[0][0].parts[name], part[5:9])
    assert_same(halves[1][0].parts[name].reshape(part.shape), part)
    assert_same(kept[5:9].parts[name], part[5:9])
  assert kept[7].shape == (width,)
  assert_same(decoded(kept[5:9]), halves[0][1])


@pytest.mark.parametrize("format", ["fp4", "mxfp4"])
def test_e2m1_codes_lie_in_split_halves(format):
  for width in (17, 40):
    codes = np.asarray(quantised(rows(width), format).codes)
    half = -(-width // 2)
    want = codes[:, :half].copy()
    want[:, : width - half] |= codes[:, half:] << 4
    kept = every_width(format)[WIDTHS.index(width)][0].parts["codes"]
    np.testing.assert_array_equal(kept, want)
    assert (np.asarray(EvenColumnLow.pack(codes).bytes) != want).any()


@pytest.mark.parametrize("format", PACKED)
def test_packed_rows_are_constant(format):
  kept, values, _ = every_width(format)[0]
  gradient = kept.with_gradient(values)
  assert {part.dtype for part in jax.tree.leaves(gradient)} == {jax.dtypes.float0}
  assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, kept)


def test_plain_rows_are_differentiable_as_they_are():
  x = jnp.asarray(rows(17)[20:])
  kept = Stored.plain(x)
  np.testing.assert_array_equal(kept.decode(), x)
  gradient = jax.grad(lambda x: (Stored.plain(x).decode() ** 2).sum() / 2)(x)
  np.testing.assert_array_equal(gradient, x)
  np.testing.assert_array_equal(kept.with_gradient(gradient).parts["values"], x)
