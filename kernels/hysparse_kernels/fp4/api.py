"""The operations as callers see them."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels import arguments, dispatch
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

  Raises:
    ValueError: an unknown format, no rows.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("fp4.pack", backend, PACK)
  _check("x", x, format)
  return run(jax.lax.stop_gradient(x), format)


def unpack(
  rows: Stored, dtype: jnp.dtype = jnp.float32, *, backend: str = "auto"
) -> Float[Array, "... C"]:
  """The values of rows, `rows.decode(dtype)`, the same bits from all backends. No gradient.

  Raises:
    ValueError: plain rows, no rows.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("fp4.unpack", backend, UNPACK)
  _check("rows", rows, rows.format)
  return run(jax.lax.stop_gradient(rows), dtype)


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

  Raises:
    ValueError: a pool of plain rows, arrays whose shapes or dtypes do not fit each other.
    TypeError: a pool that is none.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("fp4.append", backend, APPEND)
  if not isinstance(paged, Paged):
    raise TypeError(f"paged: is a {type(paged).__name__}; must be Paged")
  paged = jax.tree.map(jnp.asarray, paged)
  _check("paged.rows", paged.rows, paged.rows.format)
  paged.check(arguments.sizes(ids_BxN=ids_BxN, valid_BxN=valid_BxN)["B"])
  arguments.integers(ids_BxN=ids_BxN)
  row = (*ids_BxN.shape, *paged.rows.shape[1:])
  if x.shape != row:
    raise ValueError(f"x: has shape {list(x.shape)}; must be {list(row)}")
  return run(*jax.lax.stop_gradient((paged, ids_BxN.astype(jnp.int32), x)), valid_BxN)


def _check(name: str, rows: Array | Stored, format: str) -> None:
  if format not in get_args(Format):
    legal = ", ".join(get_args(Format))
    raise ValueError(f"format of {name}: is '{format}'; must be one of {legal}")
  if 0 in rows.shape:
    raise ValueError(f"{name}: has shape {list(rows.shape)}; no axis may be empty")
