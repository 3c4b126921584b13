"""One softmax over keys that were attended to in parts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def join(
  out_JxBxSxHxC: Float[Array, "J B S H C"], lse_JxBxSxH: Float[Array, "J B S H"], dtype: jnp.dtype
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S H"]]:
  """(out, lse) of parts that were normalised apart; at least one of them must not be empty (-inf).

  The sink belongs to one of the parts.
  """
  if len(out_JxBxSxHxC) == 1:
    return out_JxBxSxHxC[0].astype(dtype), lse_JxBxSxH[0]
  top_BxSxH = lse_JxBxSxH.max(0)
  weight_JxBxSxH = jnp.exp(lse_JxBxSxH - top_BxSxH)
  total_BxSxH = weight_JxBxSxH.sum(0)
  share_JxBxSxHx1 = (weight_JxBxSxH / total_BxSxH)[..., None]
  out_BxSxHxC = (out_JxBxSxHxC * share_JxBxSxHx1).sum(0)
  return out_BxSxHxC.astype(dtype), top_BxSxH + jnp.log(total_BxSxH)
