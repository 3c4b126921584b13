"""Differences between jax versions and platforms, in one place (jax 0.10.2 to 0.12)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
  """An einsum with a float32 result and float32 accumulation, whatever the operands are.

  XLA on CPU has no bfloat16 x bfloat16 -> float32 dot for every layout (it fails at run time, not
  when compiling), so there the operands are widened first; elsewhere they keep their width.
  """
  if jax.default_backend() == "cpu":
    operands = tuple(x.astype(jnp.float32) for x in operands)
  return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)
