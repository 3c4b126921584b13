"""What sparse attention reads and returns."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
  """Keys (which are also the values) that the S queries of a call may attend to.

  Query s stands at window row P - S + s and sees the `window` rows up to and including its own,
  each only if its tag is the position expected there: that one check keeps documents apart, hides
  rows that were never written, and keeps a stale ring row from taking part.

  Attributes:
    window_BxPxC: P - S rows from before the call, then one row for each query of the call.
    tags_BxP: position, inside its document, of the token each row belongs to; negative: none.
    entries_BxTxC: compressed entries, or None for a window-only layer.
    rows_BxSxK: the entries selected for each query, -1 for none; None without entries.
    window: W, how many rows a query sees at most (static).
  """

  window_BxPxC: Float[Array, "B P C"]
  tags_BxP: Int[Array, "B P"]
  entries_BxTxC: Float[Array, "B T C"] | None = None
  rows_BxSxK: Int[Array, "B S K"] | None = None
  window: int = dataclasses.field(default=1, metadata={"static": True})


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
