"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels import fp4
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.paged import NOWHERE, Paged


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of calls with new entries of several sequences.

  Attributes:
    entries: new ones of each sequence, up to the first that there is no room for.
    page: entries in a block of the pool.
    pages: blocks of each sequence; the pool has one more.
    valid: how many of the new entries are.
    dtype: of the rows, before they are packed and after they are unpacked.
  """

  name: str
  format: Format = "fp4"
  batch: int = 1
  entries: int = 24
  channels: int = 64
  page: int = 8
  pages: int = 6
  valid: int | None = None
  dtype: str = "float32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `call`."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(self.batch * self.pages + 1)[:-1].reshape(self.batch, self.pages)
    old = rng.integers(0, 256, (self._rows, 2 * self.channels))
    x = jnp.asarray(_values(rng, (self.batch, self.entries, self.channels)), self.dtype)
    return self._arrays(x, jnp.asarray(old), jnp.asarray(table, jnp.int32))

  def shapes(self) -> dict:
    """What `arguments` returns, with arrays described instead of allocated."""

    def arrays():
      x = jnp.zeros((self.batch, self.entries, self.channels), self.dtype)
      table = jnp.zeros((self.batch, self.pages), jnp.int32)
      return self._arrays(x, jnp.zeros((self._rows, 2 * self.channels), jnp.int32), table)

    return jax.eval_shape(arrays)

  @property
  def _rows(self) -> int:
    return (self.batch * self.pages + 1) * self.page

  def _arrays(self, x: jax.Array, old: jax.Array, table_BxJ: jax.Array) -> dict:
    shape = jax.eval_shape(lambda: Stored.of(jnp.zeros((self._rows, self.channels)), self.format))
    pool = jax.tree.map(lambda part: old[:, : part.shape[-1]].astype(part.dtype), shape)
    # Newest first, as nothing asks for an order; there is no room for the newest of several.
    newest = self.pages * self.page - (self.entries == 1)
    ids_BxN = jnp.broadcast_to(newest - jnp.arange(self.entries), x.shape[:2])
    return {
      "x": x,
      "paged": Paged(pool, table_BxJ.at[0, 0].set(NOWHERE), self.page),
      "ids_BxN": ids_BxN.astype(jnp.int32),
      "valid_BxN": jnp.broadcast_to(
        jnp.arange(self.entries) < (self.entries if self.valid is None else self.valid),
        x.shape[:2],
      ),
    }


def call(arguments: Mapping[str, Any], backend: str) -> dict[str, Any]:
  """All three operations, on the rows of a spec."""
  x, paged = arguments["x"], arguments["paged"]
  packed = fp4.pack(x, paged.rows.format, backend=backend)
  places = arguments["ids_BxN"], x, arguments["valid_BxN"]
  return {
    "packed": packed,
    "unpacked": fp4.unpack(packed, x.dtype, backend=backend),
    "pool": fp4.append(paged, *places, backend=backend).rows,
    "old": fp4.unpack(paged.rows[: x.shape[1]], x.dtype, backend=backend),  # of any bytes
  }


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """Rows of every magnitude; ties, zeros, subnormals, infinities and NaN among them."""
  *_, width = shape
  x = rng.normal(size=shape).reshape(-1, width)
  with np.errstate(over="ignore", under="ignore"):
    wide = np.float32(x * 10.0 ** rng.integers(-44, 38, (len(x), 1)))
  kind = rng.integers(0, 8, (len(x), 1))
  x = np.where(kind < 3, wide, np.float32(x))
  # Ties: middles between codes, times a power of two and a three (of E4M3 scales).
  ties = rng.integers(-24, 25, x.shape) / 4 * 2.0 ** rng.integers(-9, 9, kind.shape)
  x = np.where(kind == 3, ties * rng.choice([1, 3], kind.shape), x)
  x = np.where(kind == 4, x * rng.integers(0, 2, x.shape), x)  # signed zeros
  special = rng.choice([np.nan, np.inf, -np.inf, 1e-45, 3e38], x.shape)
  x = np.where((kind == 5) & (rng.random(x.shape) < 0.05), special, x)
  return np.float32(np.where(kind == 6, 0, x)).reshape(shape)


SPECS = (
  Spec("fp4"),
  Spec("mxfp4", "mxfp4"),
  Spec("fp8", "fp8", valid=13),
  Spec("odd_sizes", batch=2, entries=19, channels=37, page=3, pages=7, valid=11),
  Spec("odd_mxfp4", "mxfp4", batch=2, channels=50, page=5),
  Spec("odd_fp8", "fp8", entries=9, channels=39, page=3, pages=4),
  Spec("one_channel", channels=1),
  Spec("one_token", batch=3, entries=1, valid=1),
  Spec("none_valid", batch=2, valid=0),
  Spec("bfloat16", batch=2, channels=96, dtype="bfloat16"),
  Spec("bfloat16_mxfp4", "mxfp4", channels=128, dtype="bfloat16"),
  Spec("bfloat16_fp8", "fp8", dtype="bfloat16"),
  Spec("wide", batch=2, entries=45, channels=256, page=5, pages=11, valid=41),
  Spec("odd_wide_fp8", "fp8", batch=2, channels=131, page=7),
  Spec("without_codes", "bf16", batch=2),
)

_released = functools.partial(Spec, channels=512, page=64, dtype="bfloat16")

# Sizes of the released model: for benchmarks, and compile checks over `shapes`.
RELEASED = (
  _released("released_prefill", entries=4096, pages=1024),
  _released("released_decode", batch=8, entries=1, pages=128),
  _released("released_index_keys", "mxfp4", entries=4096, channels=128, pages=1024),
  _released("released_window", "fp8", batch=8, entries=128, pages=2),
  # The last rows begin behind 2^31 bytes of codes.
  _released("released_large_pool", batch=8, entries=1, pages=2**14 + 16),
)
