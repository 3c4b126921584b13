"""What stands around every kernel: the gradient and the mass of the entries, both portable."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from hysparse_kernels.sparse_attention import xla
from hysparse_kernels.sparse_attention.mass import selection_mass
from hysparse_kernels.sparse_attention.view import Attended, View

# (q, positions, view, sink, scale) -> (out, lse)
Kernel = Callable[[jax.Array, jax.Array, View, jax.Array, float], tuple[jax.Array, jax.Array]]
Backend = Callable[[jax.Array, jax.Array, View, jax.Array, float], Attended]


def backend_of(kernel: Kernel) -> Backend:
  """The operation from a forward kernel: the backward pass is that of the xla backend."""

  @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
  def attend(scale, q, positions, view, sink):
    return kernel(q, positions, view, sink, scale)

  def forward(scale, *inputs):
    out, lse = kernel(*inputs, scale)
    return (out, lse), (*inputs, out, lse)

  attend.defvjp(forward, xla.backward)

  def sparse_attention(
    q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
  ) -> Attended:
    out, lse = attend(scale, q_BxSxHxC, positions_BxS, view, sink_H)
    return Attended(out, lse, selection_mass(q_BxSxHxC, positions_BxS, view, lse, scale))

  return sparse_attention
