"""The plain definition: each token gathers the weights of its experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import fake_quant, round_to
from hysparse_kernels.moe.activation import swiglu
from hysparse_kernels.moe.matrices import Weights, matrices


def moe(
  x_NxD: jax.Array,
  ids_NxA: jax.Array,
  weights_NxA: jax.Array,
  w_gate: Weights,
  w_up: Weights,
  w_down: Weights,
  limit: float,
  released_rounding: bool,
) -> jax.Array:
  dtype = x_NxD.dtype
  used_NxA = (ids_NxA >= 0) & (ids_NxA < w_gate.shape[0])
  ids_NxA = jnp.where(used_NxA, ids_NxA, 0)
  if released_rounding:
    x_NxD = fake_quant(x_NxD, "fp8")
  gate_NxAxF = einsum("nd,nadf->naf", x_NxD, matrices(w_gate, ids_NxA, dtype))
  up_NxAxF = einsum("nd,nadf->naf", x_NxD, matrices(w_up, ids_NxA, dtype))
  if released_rounding:
    gate_NxAxF, up_NxAxF = round_to(gate_NxAxF, dtype), round_to(up_NxAxF, dtype)
  inner_NxAxF = weights_NxA[..., None] * swiglu(gate_NxAxF, up_NxAxF, limit)
  inner_NxAxF = jnp.where(used_NxA[..., None], inner_NxAxF, 0).astype(dtype)
  if released_rounding:
    inner_NxAxF = fake_quant(inner_NxAxF, "fp8")
  y_NxAxD = einsum("naf,nafd->nad", inner_NxAxF, matrices(w_down, ids_NxA, dtype))
  if released_rounding:
    y_NxAxD = round_to(y_NxAxD, dtype)
  return y_NxAxD.sum(1)
