"""The plain definition: each token gathers the weights of its experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.compat import einsum
from hysparse_kernels.moe.activation import swiglu


def moe(
  x_NxD: jax.Array,
  ids_NxA: jax.Array,
  weights_NxA: jax.Array,
  w_gate_ExDxF: jax.Array,
  w_up_ExDxF: jax.Array,
  w_down_ExFxD: jax.Array,
  limit: float,
) -> jax.Array:
  used_NxA = (ids_NxA >= 0) & (ids_NxA < w_gate_ExDxF.shape[0])
  ids_NxA = jnp.where(used_NxA, ids_NxA, 0)
  gate_NxAxF = einsum("nd,nadf->naf", x_NxD, w_gate_ExDxF[ids_NxA])
  up_NxAxF = einsum("nd,nadf->naf", x_NxD, w_up_ExDxF[ids_NxA])
  inner_NxAxF = weights_NxA[..., None] * swiglu(gate_NxAxF, up_NxAxF, limit)
  inner_NxAxF = jnp.where(used_NxA[..., None], inner_NxAxF, 0).astype(x_NxD.dtype)
  y_NxD = einsum("naf,nafd->nd", inner_NxAxF, w_down_ExFxD[ids_NxA])
  return y_NxD.astype(x_NxD.dtype)
