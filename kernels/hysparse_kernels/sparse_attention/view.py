"""What sparse attention reads and returns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hysparse_kernels.formats import Stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
  """Keys (which are also the values) that the S queries of a call may attend to.

  Query s stands at window row P - S + s and sees the `window` rows up to and including its own,
  each only if its tag is the position expected there: that one check keeps documents apart, hides
  rows that were never written, and keeps a stale ring row from taking part.

  Packed and plain rows are the same to the operation, which decodes what it reads (`read`).
  Gradients are for plain ones.

  Attributes:
    window: [B, P, C]: P - S rows from before the call, then one row for each query of the call.
    tags_BxP: position, inside its document, of the token each row belongs to; negative: none.
    entries: [R, C]: compressed entries of all sequences; None for a window-only layer. Plain ones
      must be finite, row 0 too if a query selects less than K: what is not selected counts 0 times.
    rows_BxSxK: rows of `entries` selected for each query, below R, -1 for none; None without
      entries.
    width: W, how many window rows a query sees at most (static).
  """

  window: Stored
  tags_BxP: Int[Array, "B P"]
  entries: Stored | None = None
  rows_BxSxK: Int[Array, "B S K"] | None = None
  width: int = dataclasses.field(default=1, metadata={"static": True})


def dtype_of(rows: Stored, dtype: jnp.dtype) -> jnp.dtype:
  """The dtype of rows for queries of this one: the same, or a narrower one that they have."""
  if rows.format != "plain":
    return jnp.dtype(dtype)
  return min(jnp.dtype(dtype), rows.parts["values"].dtype, key=lambda dtype: dtype.itemsize)


def read(rows: Stored, there: Bool[Array, "*rows"], dtype: jnp.dtype) -> Float[Array, "*rows C"]:
  """Values of rows for queries of this dtype, see `dtype_of`.

  Of stored rows those that are not there become 0: they may be another sequence's, and 0 times a
  NaN of theirs would be NaN. (Plain rows are all one caller's, and copying them takes time.)
  """
  if rows.format == "plain":
    return rows.parts["values"].astype(dtype_of(rows, dtype))
  return jnp.where(there[..., None], rows.decode(dtype), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attended:
  """The result of an attention operation.

  Attributes:
    out_BxSxHxC: sum of softmax probability times value, in the dtype of the queries.
    lse_BxSxH: log of the softmax denominator (the sink included), float32.
    mass_BxSxK: probability of each selected entry summed over the heads, float32, without
      gradient; None if nothing was selected.
  """

  out_BxSxHxC: Float[Array, "B S H C"]
  lse_BxSxH: Float[Array, "B S H"]
  mass_BxSxK: Float[Array, "B S K"] | None = None
