"""Reads a weight leaf: a plain array, codes and scales as a checkpoint has them, or a host table.

A plain matrix is [inputs, outputs]; `Quantised` keeps the checkpoint's [outputs, inputs]. Experts
may be `Separate`. Modules never ask which they hold: they call these functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import Separate
from jaxtyping import Array, Float, Int

from hysparse.nn.host_table import HostTable


def matmul(x: Float[Array, "... I"], weight: nnx.Param) -> Float[Array, "... O"]:
  """x times the weight, in the dtype of x."""
  value = weight.get_value()
  if isinstance(value, Quantised):
    return jnp.einsum("...i,oi->...o", x, value.dequantise(x.dtype))
  return x @ value.astype(x.dtype)


def grouped_matmul(x: Float[Array, "... G I"], weight: nnx.Param) -> Float[Array, "... G O"]:
  """Each group of channels times its own matrix; plain [G, I, O], quantised [G * O, I]."""
  value = weight.get_value()
  if isinstance(value, Quantised):
    matrix_GxOxI = value.dequantise(x.dtype).reshape(x.shape[-2], -1, x.shape[-1])
    return jnp.einsum("...gi,goi->...go", x, matrix_GxOxI)
  return jnp.einsum("...gi,gio->...go", x, value.astype(x.dtype))


def expert_matrices(weight: nnx.Param, dtype: jnp.dtype) -> jax.Array | Quantised | Separate:
  """All experts' matrices for the `moe` operation, which decodes or casts those that it uses."""
  value = weight.get_value()
  return value if isinstance(value, Quantised | Separate) else value.astype(dtype)


def look_up(table: nnx.Param, rows: Int[Array, "..."], dtype: jnp.dtype) -> Float[Array, "... D"]:
  """Rows of a table; of a quantised or a host table only the rows asked for are decoded."""
  value = table.get_value()
  if isinstance(value, HostTable):
    return value.lookup(rows).astype(dtype)
  if isinstance(value, Quantised):
    return value[rows].dequantise(dtype)
  return value[rows].astype(dtype)
