"""The activation of every expert, routed and shared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(
  gate: Float[Array, "*shape"], up: Float[Array, "*shape"], limit: float
) -> Float[Array, "*shape"]:
  """silu(min(gate, limit)) * clip(up, -limit, limit), float32; a limit of 0 clamps nothing.

  Source: arXiv 2609.19969 and the released code (`swiglu_limit`).
  """
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  if limit:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
  return jax.nn.silu(gate) * up
