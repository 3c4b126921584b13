"""Portable backend: quantises in integers, whole blocks at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.formats import QUANTISERS, Format, Stored
from hysparse_kernels.fp4 import integers, reference
from hysparse_kernels.paged import Paged

unpack = reference.unpack


def pack(x: jax.Array, format: Format) -> Stored:
  if format not in QUANTISERS:
    return reference.pack(x, format)
  *rows, C = x.shape
  quantiser = QUANTISERS[format]
  bits = integers.bits_of(_padded(x, quantiser.block)).reshape(*rows, -1, quantiser.block)
  scales = integers.scale_codes(integers.magnitude(bits).max(-1), format)
  codes = integers.codes(bits, scales[..., None], format).reshape(*rows, -1)[..., :C]
  if quantiser.element.sign_bit < 16:
    # A sum, because XLA on CPU would compute the codes apart for each half of a byte.
    halves = _padded(codes, 2).reshape(*rows, 2, -1)
    codes = (halves << jnp.array([[0], [4]])).sum(-2)
  parts = {"codes": codes.astype(jnp.uint8), "scales": scales.astype(jnp.uint8)}
  return Stored(parts, format, C)


def append(paged: Paged, ids_BxN: jax.Array, x: jax.Array, valid_BxN: jax.Array) -> Paged:
  return paged.put(ids_BxN, pack(x, paged.rows.format), valid_BxN)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
  """x with zeros behind it up to a multiple of channels."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])
