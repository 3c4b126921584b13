"""Choices sorted by expert, computed in blocks of rows that share one.

Sorting the N A choices makes each expert's rows one run, which is cut into blocks of equal size. A
loop over the blocks (as many as there really are, so that skewed routing costs no more than even)
reads the rows, slices the expert's weights and writes its rows of the result. The last block of a
run reaches into the next one: those rows are overwritten by their own block, and masked where
blocks are summed. Results return to their tokens by a gather, never by scattered additions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hysparse_kernels import tuning
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Quantised, fake_quant, round_to
from hysparse_kernels.moe.activation import swiglu
from hysparse_kernels.moe.balance import expert_load
from hysparse_kernels.moe.matrices import Separate, Weights, matrices

# A slice of the weights is copied for each block: few rows cost what four do.
_LEAST_ROWS = 4


def block_rows(tokens: int, active: int, experts: int, least: int) -> int:
  """Rows of a block: about the mean run, so that few experts' blocks are mostly empty.

  What blocks beyond the table's size win, they waste in the last block of each run.

  Args:
    least: rows, if there are so many tokens.
  """
  most = tuning.sizes("moe", "xla", tokens=tokens)["rows"]
  mean = max(1, tokens * active // experts)
  return min(most, max(1 << (mean - 1).bit_length(), min(tokens, least)))


class Plan(NamedTuple):
  """Where every choice goes: R = N A + rows sorted rows, so that every block stays inside."""

  rows: int  # of a block
  blocks: jax.Array  # how many blocks there are
  expert: jax.Array  # of each block
  first: jax.Array  # row of each block
  filled: jax.Array  # rows of each block, at least 1, that belong to its expert
  choice_R: jax.Array  # token * A + a
  row_NxA: jax.Array
  used_NxA: jax.Array

  def read(self, values_R: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(values_R, self.first[block], self.rows)

  def write(self, into_R: jax.Array, values: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(into_R, values, self.first[block], 0)

  def gather(self, values_R: jax.Array) -> jax.Array:
    """[R, ...] to [N, A, ...], 0 where a choice is no expert."""
    used = jnp.expand_dims(self.used_NxA, range(2, 1 + values_R.ndim))
    return jnp.where(used, values_R[self.row_NxA], 0)


def make_plan(ids_NxA: jax.Array, experts: int, least_rows: int = _LEAST_ROWS) -> Plan:
  choices = ids_NxA.size
  rows = block_rows(*ids_NxA.shape, experts, least_rows)
  used_NxA = (ids_NxA >= 0) & (ids_NxA < experts)
  order = jnp.argsort(jnp.where(used_NxA, ids_NxA, experts).reshape(-1), stable=True)
  row = jnp.zeros_like(order).at[order].set(jnp.arange(choices), unique_indices=True)

  load_E = expert_load(ids_NxA, experts)
  blocks_E = -(-load_E // rows)
  ends_E = jnp.cumsum(blocks_E)
  # Full blocks, and one that is not full for each expert that has any rows.
  block = jnp.arange(choices // rows + min(experts, choices))
  expert = jnp.searchsorted(ends_E, block, side="right").astype(jnp.int32)
  before = (block - (ends_E - blocks_E)[expert]) * rows  # rows of the run in earlier blocks
  return Plan(
    rows=rows,
    blocks=ends_E[-1],
    expert=expert,
    first=(jnp.cumsum(load_E) - load_E)[expert] + before,
    filled=jnp.minimum(load_E[expert] - before, rows),
    choice_R=jnp.pad(order, (0, rows)),
    row_NxA=row.reshape(ids_NxA.shape),
    used_NxA=used_NxA,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
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
  weights = (w_gate, w_up, w_down)
  are_separate = all(isinstance(w, Separate) for w in weights)
  plan = make_plan(ids_NxA, w_gate.shape[0], 1 if are_separate else _LEAST_ROWS)
  token_R, weights_R = plan.choice_R // ids_NxA.shape[1], weights_NxA.reshape(-1)[plan.choice_R]
  rounding = Rounding(x_NxD.dtype, released_rounding)
  x_NxD = rounding.input(x_NxD)

  def expert(x, weights_r, gate_DxF, up_DxF, down_FxD):
    gate = rounding.output(einsum("rd,df->rf", x, gate_DxF))
    up = rounding.output(einsum("rd,df->rf", x, up_DxF))
    inner = rounding.input(weights_r[:, None] * swiglu(gate, up, limit))
    return rounding.output(einsum("rf,fd->rd", inner, down_FxD))

  # One for each expert: a matrix is an operand of the product, where it lies.
  branches = [
    lambda x, weights_r, own=own: expert(x, weights_r, *(w.astype(x.dtype) for w in own))
    for own in (zip(*(w.experts for w in weights), strict=True) if are_separate else ())
  ]

  def block(i, y_RxD):
    x, weights_r = x_NxD[plan.read(token_R, i)], plan.read(weights_R, i)
    if are_separate:
      y = lax.switch(plan.expert[i], branches, x, weights_r)
    else:
      y = expert(x, weights_r, *(matrices(w, plan.expert[i], x.dtype) for w in weights))
    return plan.write(y_RxD, y, i)

  y_RxD = jnp.zeros((token_R.shape[0], x_NxD.shape[1]), jnp.float32)
  y_RxD = lax.fori_loop(0, plan.blocks, block, y_RxD)
  return plan.gather(y_RxD).sum(1)


class Rounding(NamedTuple):
  """What happens to the inputs and the float32 outputs of an expert's matrices."""

  dtype: jnp.dtype
  released: bool

  def input(self, x: jax.Array) -> jax.Array:
    x = x.astype(self.dtype)
    return fake_quant(x, "fp8") if self.released else x

  def output(self, y: jax.Array) -> jax.Array:
    return round_to(y, self.dtype) if self.released else y


def _forward(x_NxD, ids_NxA, weights_NxA, w_gate, w_up, w_down, limit, released_rounding):
  inputs = (x_NxD, ids_NxA, weights_NxA, w_gate, w_up, w_down)
  if any(isinstance(w, Quantised) for w in inputs[3:]):
    raise ValueError("moe: quantised experts have no gradient; dequantise the weights to train")
  if any(isinstance(w, Separate) for w in inputs[3:]):
    raise ValueError("moe: separate experts have no gradient; stack the weights to train")
  return moe(*inputs, limit, released_rounding), inputs


def _backward(limit, released_rounding, inputs, dy_NxD):
  """Recomputes each block's activations; gradients of the weights are summed in place.

  Rounding passes gradients straight through.
  """
  x_NxD, ids_NxA, weights_NxA, gates_ExDxF, ups_ExDxF, downs_ExFxD = inputs
  plan = make_plan(ids_NxA, gates_ExDxF.shape[0])
  token_R, weights_R = plan.choice_R // ids_NxA.shape[1], weights_NxA.reshape(-1)[plan.choice_R]
  rounding = Rounding(x_NxD.dtype, released_rounding)
  x_NxD = rounding.input(x_NxD)
  dy_NxD = dy_NxD.astype(x_NxD.dtype)

  def block(i, sums):
    dx_RxD, dweights_R, dw_gate, dw_up, dw_down = sums
    expert, tokens = plan.expert[i], plan.read(token_R, i)
    weights = plan.read(weights_R, i)[:, None]
    w_gate, w_up, w_down = gates_ExDxF[expert], ups_ExDxF[expert], downs_ExFxD[expert]
    # Rows of other experts become 0 on both ends, and so does all that they contribute.
    mine = (jnp.arange(plan.rows) < plan.filled[i])[:, None]
    x, dy = jnp.where(mine, x_NxD[tokens], 0), jnp.where(mine, dy_NxD[tokens], 0)

    gate, up = (rounding.output(einsum("rd,df->rf", x, w)) for w in (w_gate, w_up))
    active, activation_vjp = jax.vjp(functools.partial(swiglu, limit=limit), gate, up)
    dinner = einsum("rd,fd->rf", dy, w_down)
    dgate, dup = (d.astype(x.dtype) for d in activation_vjp(weights * dinner))
    inner = rounding.input(weights * active)
    dx = einsum("rf,df->rd", dgate, w_gate) + einsum("rf,df->rd", dup, w_up)
    return (
      plan.write(dx_RxD, dx, i),
      plan.write(dweights_R, (dinner * active).sum(1), i),
      dw_gate.at[expert].add(einsum("rd,rf->df", x, dgate)),
      dw_up.at[expert].add(einsum("rd,rf->df", x, dup)),
      dw_down.at[expert].add(einsum("rf,rd->fd", inner, dy)),
    )

  shapes = ((token_R.shape[0], x_NxD.shape[1]), token_R.shape, *(w.shape for w in inputs[3:]))
  sums = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
  dx_RxD, dweights_R, *dw = lax.fori_loop(0, plan.blocks, block, sums)
  return (
    plan.gather(dx_RxD).sum(1).astype(x_NxD.dtype),
    None,
    plan.gather(dweights_R).astype(weights_NxA.dtype),
    *(d.astype(w.dtype) for d, w in zip(dw, inputs[3:], strict=True)),
  )


moe.defvjp(_forward, _backward)
