"""The plain definition: the codecs of `formats`, one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.paged import Paged


def pack(x: jax.Array, format: Format) -> Stored:
  return Stored.of(x, format)


def unpack(rows: Stored, dtype: jnp.dtype) -> jax.Array:
  return rows.decode(dtype)


def append(paged: Paged, ids_BxN: jax.Array, x: jax.Array, valid_BxN: jax.Array) -> Paged:
  return paged.put(ids_BxN, Stored.of(x, paged.rows.format), valid_BxN)
