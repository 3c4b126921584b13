"""Decoding inside kernels: the same values, to the bit, as the codecs outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels.formats import Stored, tiles

# Every byte of codes and scales occurs; 34 channels end in a part of a block.
CHANNELS = 34


def stored(format):
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: Stored.of(jnp.zeros((512, CHANNELS)), format))
  return jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 256, x.shape), x.dtype), shapes)


@pytest.mark.parametrize("format", ["fp4", "mxfp4", "fp8", "bf16"])
def test_tiles_decode_to_the_bit_in_rows_and_in_columns(format):
  rows = stored(format)
  want = np.asarray(rows.decode())
  assert tiles.width(rows) == CHANNELS
  columns = jax.tree.map(jnp.transpose, rows)
  for got in (tiles.decode(rows), tiles.decode_columns(columns).T):
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_an_odd_channel_has_a_zero_behind_it():
  rows = Stored.of(jnp.ones((3, 33)), "mxfp4")
  assert tiles.width(rows) == 34
  np.testing.assert_array_equal(tiles.decode(rows), np.pad(np.ones((3, 33)), [(0, 0), (0, 1)]))
