"""Accelerator backend: choices sorted by expert, and XLA's own grouped matrix product.

`jax.lax.ragged_dot` is a kernel of the compiler on TPU and GPU. (On CPU it is a masked dense
product, many times slower than the xla backend.) Choices that are no expert are sorted behind all
groups, where the product gives zeros.

Quantised weights go to the xla backend, which decodes one expert at a time: the grouped product
would need all of them decoded, 9 GB for each matrix of a released layer. So do separate ones, which
are made for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hysparse_kernels import compat
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import xla
from hysparse_kernels.moe.activation import swiglu
from hysparse_kernels.moe.balance import expert_load
from hysparse_kernels.moe.matrices import Separate, Weights


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
  matrices = (w_gate, w_up, w_down)
  E, (N, A) = w_gate.shape[0], ids_NxA.shape
  if any(isinstance(w, Quantised | Separate) for w in matrices):
    return xla.moe(x_NxD, ids_NxA, weights_NxA, *matrices, limit, released_rounding)
  rounding = xla.Rounding(x_NxD.dtype, released_rounding)
  used_NxA = (ids_NxA >= 0) & (ids_NxA < E)
  order = jnp.argsort(jnp.where(used_NxA, ids_NxA, E).reshape(-1), stable=True)
  load_E = expert_load(ids_NxA, E)

  def product(x_RxI: jax.Array, w_ExIxO: jax.Array) -> jax.Array:
    x_RxI, w_ExIxO = compat.widened(x_RxI, w_ExIxO)
    y = lax.ragged_dot(x_RxI, w_ExIxO, load_E, preferred_element_type=jnp.float32)
    return rounding.output(y)

  x_RxD = rounding.input(x_NxD)[order // A]
  gate, up = product(x_RxD, matrices[0]), product(x_RxD, matrices[1])
  weights_R = jnp.where(used_NxA, weights_NxA, 0).reshape(-1)[order]
  inner = rounding.input(weights_R[:, None] * swiglu(gate, up, limit))
  y_RxD = product(inner, matrices[2])
  y_NxAxD = y_RxD[jnp.argsort(order)].reshape(N, A, -1)
  return jnp.where(used_NxA[..., None], y_NxAxD, 0).sum(1)
