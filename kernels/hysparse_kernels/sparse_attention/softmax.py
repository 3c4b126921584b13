"""The softmax with a sink, arranged so that narrow values meet the rounding of the released code.

Probabilities are taken relative to the largest score of the keys and rounded to the dtype of the
values where they multiply them; the denominator sums them as they are. The sink joins it only
then: it may exceed every score by any amount.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Offsets(NamedTuple):
  """What scores are taken relative to, without gradient.

  Attributes:
    keys: the largest score of the keys; the sink for a query without keys.
    all: the larger of that and the sink.
  """

  keys: Float[Array, "B S H"]
  all: Float[Array, "B S H"]

  @property
  def fade(self) -> Float[Array, "B S H"]:
    """The factor from what is relative to the keys to what is relative to all."""
    return jnp.exp(self.keys - self.all)


def offsets(largest_BxSxH: Float[Array, "B S H"], sink_H: Float[Array, " H"]) -> Offsets:
  """Offsets of queries whose largest score this is; -inf without keys."""
  largest_BxSxH, sink_H = jax.lax.stop_gradient((largest_BxSxH, sink_H.astype(jnp.float32)))
  keys = jnp.where(jnp.isfinite(largest_BxSxH), largest_BxSxH, sink_H)
  return Offsets(keys, jnp.maximum(keys, sink_H))
