"""The operations as callers see them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels import dispatch
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.fp4 import pallas_gpu, pallas_tpu, reference, xla
from hysparse_kernels.paged import Paged

_BACKENDS = {
  "reference": reference,
  "xla": xla,
  "pallas_tpu": pallas_tpu,
  "pallas_gpu": pallas_gpu,
}
PACK = {name: backend.pack for name, backend in _BACKENDS.items()}
UNPACK = {name: backend.unpack for name, backend in _BACKENDS.items()}
APPEND = {name: backend.append for name, backend in _BACKENDS.items()}


def pack(x: Float[Array, "... C"], format: Format, *, backend: str = "auto") -> Stored:
  """Rows in a format of the dial: quantised block by block and packed, `Stored.of(x, format)`.

  All backends give the same bits. No gradient.
  """
  return dispatch.select("fp4.pack", backend, PACK)(x, format)


def unpack(
  rows: Stored, dtype: jnp.dtype = jnp.float32, *, backend: str = "auto"
) -> Float[Array, "... C"]:
  """The values of rows, `rows.decode(dtype)`, the same bits from all backends. No gradient."""
  return dispatch.select("fp4.unpack", backend, UNPACK)(rows, dtype)


def append(
  paged: Paged,
  ids_BxN: Int[Array, "B N"],
  x: Float[Array, "B N ... C"],
  valid_BxN: Bool[Array, "B N"],
  *,
  backend: str = "auto",
) -> Paged:
  """The pool with rows of entries, packed in its own format; what is invalid is dropped.

  Where the old pool is not used any more, kernels write the new rows into its memory and touch no
  others.

  Args:
    ids_BxN: entries of each sequence, different ones where valid; those without a block are
      dropped, too.
  """
  return dispatch.select("fp4.append", backend, APPEND)(paged, ids_BxN, x, valid_BxN)
