"""Choices sorted by expert, computed in blocks of rows that share one.

Sorting the N A choices makes each expert's rows one run. A loop over the runs slices the expert's
weights once, and a loop inside it (as long as the run, so that skewed routing costs no more than
even) reads blocks of equal size and writes their rows of the result. The last block of a run
reaches into the next one: those rows are overwritten by their own block, and masked where blocks
are summed. Results return to their tokens by a gather, never by scattered additions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hysparse_kernels import blocks, tuning
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Quantised, fake_quant, round_to
from hysparse_kernels.moe.activation import swiglu
from hysparse_kernels.moe.balance import expert_load
from hysparse_kernels.moe.matrices import Separate, Weights, decoded, turned

# Weights are copied for each run, however short it is: few rows cost what four do.
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
  runs: jax.Array  # experts that have any rows
  expert_E: jax.Array  # those first, ascending
  first_E: jax.Array  # row of each expert's run
  load_E: jax.Array  # rows of it
  choice_R: jax.Array  # token * A + a
  row_NxA: jax.Array
  used_NxA: jax.Array

  def blocks(self, expert: jax.Array) -> jax.Array:
    """How many blocks the run of an expert has."""
    return blocks.count(self.load_E[expert], self.rows)

  def block(self, expert: jax.Array, i: jax.Array) -> Block:
    """Block `i` of the run of an expert."""
    before = i * self.rows
    left = self.load_E[expert] - before
    return Block(self.rows, self.first_E[expert] + before, jnp.minimum(left, self.rows))

  def gather(self, values_R: jax.Array) -> jax.Array:
    """[R, ...] to [N, A, ...], 0 where a choice is no expert."""
    used = jnp.expand_dims(self.used_NxA, range(2, 1 + values_R.ndim))
    return jnp.where(used, values_R[self.row_NxA], 0)


class Block(NamedTuple):
  """Sorted rows from `first` on, of which the `filled` first ones belong to the expert."""

  rows: int
  first: jax.Array
  filled: jax.Array

  def read(self, values_R: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(values_R, self.first, self.rows)

  def write(self, into_R: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(into_R, values, self.first, 0)


def make_plan(ids_NxA: jax.Array, experts: int, least_rows: int = _LEAST_ROWS) -> Plan:
  choices = ids_NxA.size
  rows = block_rows(*ids_NxA.shape, experts, least_rows)
  used_NxA = (ids_NxA >= 0) & (ids_NxA < experts)
  order = jnp.argsort(jnp.where(used_NxA, ids_NxA, experts).reshape(-1), stable=True)
  row = jnp.zeros_like(order).at[order].set(jnp.arange(choices), unique_indices=True)
  load_E = expert_load(ids_NxA, experts)
  return Plan(
    rows=rows,
    runs=(load_E > 0).sum(),
    expert_E=jnp.argsort(load_E == 0, stable=True),
    first_E=jnp.cumsum(load_E) - load_E,
    load_E=load_E,
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

  def run(k, y_RxD):
    e = plan.expert_E[k]
    own = () if are_separate else tuple(decoded(w, e, x_NxD.dtype) for w in weights)

    def block(i, y_RxD):
      at = plan.block(e, i)
      x, weights_r = x_NxD[at.read(token_R)], at.read(weights_R)
      if are_separate:
        y = lax.switch(e, branches, x, weights_r)
      else:  # turned in here: XLA on GPUs would turn all experts ahead of the loop over runs
        y = expert(x, weights_r, *map(turned, weights, own))
      return at.write(y_RxD, y)

    return lax.fori_loop(0, plan.blocks(e), block, y_RxD)

  y_RxD = jnp.zeros((token_R.shape[0], x_NxD.shape[1]), jnp.float32)
  return plan.gather(lax.fori_loop(0, plan.runs, run, y_RxD)).sum(1)


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
  """Recomputes each block's activations; gradients of an expert's weights are summed run by run.

  Rounding passes gradients straight through.
  """
  x_NxD, ids_NxA, weights_NxA, gates_ExDxF, ups_ExDxF, downs_ExFxD = inputs
  plan = make_plan(ids_NxA, gates_ExDxF.shape[0])
  token_R, weights_R = plan.choice_R // ids_NxA.shape[1], weights_NxA.reshape(-1)[plan.choice_R]
  rounding = Rounding(x_NxD.dtype, released_rounding)
  x_NxD = rounding.input(x_NxD)
  dy_NxD = dy_NxD.astype(x_NxD.dtype)

  def run(k, sums):
    dx_RxD, dweights_R, *dw = sums
    e = plan.expert_E[k]
    w_gate, w_up, w_down = gates_ExDxF[e], ups_ExDxF[e], downs_ExFxD[e]

    def block(i, sums):
      dx_RxD, dweights_R, dw_gate, dw_up, dw_down = sums
      at = plan.block(e, i)
      tokens, weights = at.read(token_R), at.read(weights_R)[:, None]
      # Rows of other experts become 0 on both ends, and so does all that they contribute.
      mine = (jnp.arange(at.rows) < at.filled)[:, None]
      x, dy = jnp.where(mine, x_NxD[tokens], 0), jnp.where(mine, dy_NxD[tokens], 0)

      gate, up = (rounding.output(einsum("rd,df->rf", x, w)) for w in (w_gate, w_up))
      active, activation_vjp = jax.vjp(functools.partial(swiglu, limit=limit), gate, up)
      dinner = einsum("rd,fd->rf", dy, w_down)
      dgate, dup = (d.astype(x.dtype) for d in activation_vjp(weights * dinner))
      inner = rounding.input(weights * active)
      dx = einsum("rf,df->rd", dgate, w_gate) + einsum("rf,df->rd", dup, w_up)
      return (
        at.write(dx_RxD, dx),
        at.write(dweights_R, (dinner * active).sum(1)),
        dw_gate + einsum("rd,rf->df", x, dgate),
        dw_up + einsum("rd,rf->df", x, dup),
        dw_down + einsum("rf,rd->fd", inner, dy),
      )

    own = (jnp.zeros(w.shape, jnp.float32) for w in (w_gate, w_up, w_down))
    dx_RxD, dweights_R, *own = lax.fori_loop(0, plan.blocks(e), block, (dx_RxD, dweights_R, *own))
    return dx_RxD, dweights_R, *(d.at[e].set(o) for d, o in zip(dw, own, strict=True))

  shapes = ((token_R.shape[0], x_NxD.shape[1]), token_R.shape, *(w.shape for w in inputs[3:]))
  sums = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
  dx_RxD, dweights_R, *dw = lax.fori_loop(0, plan.runs, run, sums)
  return (
    plan.gather(dx_RxD).sum(1).astype(x_NxD.dtype),
    None,
    plan.gather(dweights_R).astype(weights_NxA.dtype),
    *(d.astype(w.dtype) for d, w in zip(dw, inputs[3:], strict=True)),
  )


moe.defvjp(_forward, _backward)
