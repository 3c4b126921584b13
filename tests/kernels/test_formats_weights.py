"""Packing in both nibble orders, and weights that stay quantised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats_oracle import VALUES, nearest_code, oracle_dequantise, oracle_quantise, scale_code
from hysparse_kernels.formats import EvenColumnLow, Quantised, SplitHalf, quantise

from hysparse.cache.layout import stored_row

orders = pytest.mark.parametrize("order", [EvenColumnLow, SplitHalf])
FORMATS = ("fp8_tile", "fp8_row", "mxfp4")
formats = pytest.mark.parametrize("format", FORMATS)

quantised = jax.jit(quantise, static_argnums=1)
dequantised = jax.jit(Quantised.dequantise)


def test_every_byte_in_both_orders():
  low, high = np.arange(256) % 16, np.arange(256) // 16
  every = np.arange(256, dtype=np.uint8)
  pairs = np.stack([low, high], 1).reshape(-1)
  np.testing.assert_array_equal(EvenColumnLow(every, 512).unpack(), pairs)
  np.testing.assert_array_equal(SplitHalf(every, 512).unpack(), np.concatenate([low, high]))
  np.testing.assert_array_equal(EvenColumnLow.pack(pairs.astype(np.uint8)).bytes, every)
  halves = np.concatenate([low, high]).astype(np.uint8)
  np.testing.assert_array_equal(SplitHalf.pack(halves).bytes, every)


@orders
@pytest.mark.parametrize("channels", [1, 2, 33, 64])
def test_packing_round_trips_and_fills_the_rows_of_the_cache(order, channels):
  codes = np.random.default_rng(0).integers(0, 16, (3, 2, channels)).astype(np.uint8)
  packed = jax.jit(order.pack)(codes)
  assert packed.bytes.shape == (3, 2, *stored_row("fp4", channels)[0].shape)
  assert packed.bytes.dtype == jnp.uint8
  np.testing.assert_array_equal(jax.jit(order.unpack)(packed), codes)
  if channels % 2:
    assert (np.asarray(packed.bytes)[..., -1] < 16).all()


def test_one_order_is_never_read_as_the_other():
  codes = np.arange(8, dtype=np.uint8)
  cache, checkpoint = SplitHalf.pack(codes), EvenColumnLow.pack(codes)
  assert (np.asarray(cache.bytes) != np.asarray(checkpoint.bytes)).any()
  assert not isinstance(cache, EvenColumnLow) and not isinstance(checkpoint, SplitHalf)
  with pytest.raises(ValueError, match="different types at key path"):
    jax.tree.map(lambda a, b: a, cache, checkpoint)


def oracle(x, format):
  """(codes, scales, values) of a float32 weight [out, in]."""
  rows, columns = x.shape
  if format == "mxfp4":
    codes, scales = oracle_quantise(x, "mxfp4")
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, oracle_dequantise(codes, scales, "mxfp4")
  if format == "fp8_row":
    codes, scales = oracle_quantise(x, "fp8")
    return codes, scales, oracle_dequantise(codes, scales, "fp8")
  codes, values = np.empty(x.shape, np.uint8), np.empty(x.shape, np.float32)
  scales = np.empty((-(-rows // 32), -(-columns // 32)), np.uint8)
  for r, c in np.ndindex(scales.shape):
    at = slice(32 * r, 32 * r + 32), slice(32 * c, 32 * c + 32)
    scales[r, c] = scale_code(np.abs(x[at]).max(), "fp8")
    scale = np.ldexp(1.0, int(scales[r, c]) - 127)
    codes[at] = nearest_code("e4m3", x[at] / np.float32(scale))
    values[at] = VALUES["e4m3"][codes[at]] * scale
  return codes, scales, values


def weight(*shape, seed=0):
  """Normal values whose size differs from row to row and from column to column."""
  rng = np.random.default_rng(seed)
  sizes = np.exp(rng.uniform(-6, 4, (shape[-2], 1)) + rng.uniform(-2, 2, shape[-1]))
  return (rng.normal(size=shape) * sizes).astype(np.float32)


@formats
@pytest.mark.parametrize("shape", [(64, 96), (70, 50)])
def test_weights_quantise_to_the_bit(format, shape):
  x = weight(*shape)
  codes, scales, values = oracle(x, format)
  q = quantised(x, format)
  np.testing.assert_array_equal(q.codes, codes)
  np.testing.assert_array_equal(q.scales, scales)
  assert q.codes.dtype == q.scales.dtype == jnp.uint8
  assert q.shape == dequantised(q).shape == shape and q.ndim == 2
  np.testing.assert_array_equal(dequantised(q), values)
  narrow = q.dequantise(jnp.bfloat16)
  assert narrow.dtype == jnp.bfloat16
  np.testing.assert_array_equal(narrow.astype(jnp.float32), values)


@formats
def test_arrays_of_the_disk_are_read_as_they_are(format):
  """Every code under every scale of normal products, in NumPy arrays."""
  codes = np.arange(256, dtype=np.uint8).reshape(8, 32).repeat(32, 0)
  scales = np.resize(np.arange(10, 240), (8, 1) if format == "fp8_tile" else (256, 1))
  q = Quantised(codes, scales.astype(np.uint8), format)
  if format == "mxfp4":
    q = Quantised(codes[:, :16], scales.astype(np.uint8), format)
    pairs = np.stack([codes[:, :16] & 15, codes[:, :16] >> 4], -1).reshape(256, 32)
    values = VALUES["e2m1"][pairs]
  else:
    values = VALUES["e4m3"][codes]
  each = scales.repeat(256 // len(scales), 0)
  want = (values * np.ldexp(1.0, each - 127)).astype(np.float32)
  np.testing.assert_array_equal(dequantised(q), want)


@formats
def test_layers_and_experts_are_sliced_before_they_are_decoded(format):
  x = weight(3, 2, 40, 64)
  q = quantised(x, format)
  whole = dequantised(q)
  assert q.shape == x.shape and q.ndim == 4 and q[...] is q
  pick = jax.jit(lambda q, i, j: q[i][j].dequantise())
  np.testing.assert_array_equal(pick(q, 2, 1), whole[2, 1])
  np.testing.assert_array_equal(dequantised(q[1, 0]), whole[1, 0])
  np.testing.assert_array_equal(dequantised(q[1:]), whole[1:])
  np.testing.assert_array_equal(dequantised(q[jnp.array([2, 0])]), whole[jnp.array([2, 0])])
  _, scanned = jax.lax.scan(lambda c, q: (c, q.dequantise()), 0, q)
  np.testing.assert_array_equal(scanned, whole)


def test_rows_of_a_table_are_fetched_alone():
  x = weight(50, 64)
  table = jax.tree.map(np.asarray, quantised(x, "fp8_row"))
  ids = np.array([[3, 49, 3], [0, 1, 2]])
  rows = table[ids]
  assert isinstance(rows.codes, np.ndarray) and rows.shape == (2, 3, 64)
  np.testing.assert_array_equal(dequantised(rows), np.asarray(dequantised(table))[ids])


@formats
def test_an_index_into_tiles_or_columns_is_refused(format):
  q = quantised(weight(40, 64), format)
  free = 0 if format == "fp8_tile" else 1
  with pytest.raises(IndexError, match=f"only its first {free} axes can be indexed"):
    q[0, 0]
  with pytest.raises(IndexError, match=f"{format} .40, 64."):
    q[..., 0]


@formats
def test_nan_and_zero_weights(format):
  x = np.zeros((64, 64), np.float32)
  x[3, 40] = np.nan
  y = np.isnan(dequantised(quantised(x, format)))
  want = np.zeros((64, 64), bool)
  want[slice(0, 32) if format == "fp8_tile" else 3, 32:] = True
  np.testing.assert_array_equal(y, want)


def test_bad_weight_formats_are_refused_by_name():
  with pytest.raises(ValueError, match="format: is 'fp8'; must be one of fp8_tile, fp8_row, mxfp4"):
    quantise(jnp.ones((4, 4)), "fp8")
  with pytest.raises(ValueError, match="mxfp4: 33 columns; two share a byte"):
    quantise(jnp.ones((4, 33)), "mxfp4")
