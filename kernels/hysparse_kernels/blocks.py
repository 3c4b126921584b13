"""Cutting an axis into equal blocks to loop over, and putting it together again."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def count(length: int, size: int) -> int:
  """Blocks of `size` that cover `length`."""
  return -(-length // size)


def split(x: jax.Array, size: int, fill: float | int = 0) -> jax.Array:
  """[B, S, ...] -> [blocks, B, size, ...]; the last block is padded with `fill`."""
  batch, length = x.shape[:2]
  n = count(length, size)
  pads = [(0, 0), (0, n * size - length)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pads, constant_values=fill) if n * size != length else x
  return jnp.moveaxis(x.reshape(batch, n, size, *x.shape[2:]), 1, 0)


def join(x: jax.Array, length: int) -> jax.Array:
  """[blocks, B, size, ...] -> [B, length, ...], the inverse of `split`."""
  n, batch, size = x.shape[:3]
  return jnp.moveaxis(x, 0, 1).reshape(batch, n * size, *x.shape[3:])[:, :length]
