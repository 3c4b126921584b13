"""An Engram table that stays on the host: the device gets the rows that a call looks up.

The released tables hold 197 GB, more than a device. As a memory-mapped file nothing of them is read
before a row is asked for, and then only that row's pages.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from hysparse_kernels.formats import Quantised
from jaxtyping import Array, Float, Int, UInt8


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HostTable:
  """Codes and scales of a table, in the place of a `Quantised` of format "fp8_row".

  A pytree without leaves, equal to itself only: compiled functions hold on to it as a constant,
  optimizers, digests and copies between devices pass it by. It takes no gradient.

  Attributes:
    codes: E4M3, NumPy or memory-mapped.
    scales: E8M0, one for 32 columns of each row.
  """

  codes: UInt8[np.ndarray, "rows D"]
  scales: UInt8[np.ndarray, "rows blocks"]

  @property
  def shape(self) -> tuple[int, int]:
    return self.codes.shape

  def lookup(self, rows: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Float32 rows, exact; inside compiled functions a call to the host.

    A row outside the table raises there, as an error of the runtime.
    """
    outputs = [
      jax.ShapeDtypeStruct((*rows.shape, part.shape[1]), part.dtype)
      for part in (self.codes, self.scales)
    ]
    codes, scales = jax.pure_callback(self._fetch, outputs, rows, vmap_method="expand_dims")
    return Quantised(codes, scales, "fp8_row").dequantise()

  def _fetch(self, rows: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    rows = np.asarray(rows)
    if rows.size and not 0 <= rows.min() <= rows.max() < len(self.codes):
      raise IndexError(f"rows {rows.min()}..{rows.max()} of a table of {len(self.codes)}")
    return np.asarray(self.codes[rows]), np.asarray(self.scales[rows])
