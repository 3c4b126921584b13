"""The operation as callers see it."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from hysparse_kernels import dispatch
from hysparse_kernels.moe import reference, xla

_MOE = {"reference": reference.moe, "xla": xla.moe}


def moe(
  x_NxD: Float[Array, "N D"],
  ids_NxA: Int[Array, "N A"],
  weights_NxA: Float[Array, "N A"],
  w_gate_ExDxF: Float[Array, "E D F"],
  w_up_ExDxF: Float[Array, "E D F"],
  w_down_ExFxD: Float[Array, "E F D"],
  *,
  limit: float,
  backend: str = "auto",
) -> Float[Array, "N D"]:
  """The sum of each token's routed experts, in x's dtype.

      y[n] = sum_a (weights[n, a] * swiglu(x[n] w_gate[e], x[n] w_up[e], limit)) w_down[e]

  with e = ids[n, a].

  Dropless: every choice is computed, however uneven the routing. An id outside 0..E-1 (use -1) is
  no expert: it adds nothing and gets no gradient. Products accumulate in float32, the activation
  and its weight are float32 and rounded to x's dtype for w_down, the sum over A is float32.

  Args:
    weights_NxA: float32 routing weights.
    w_gate_ExDxF: the checkpoint's w1, transposed.
    w_up_ExDxF: w3.
    w_down_ExFxD: w2.
    limit: clamp of the activation (see `swiglu`), 0 for none.

  Raises:
    ValueError: a negative limit.

  Source: arXiv 2609.19969 and the released code.
  """
  if limit < 0:
    raise ValueError(f"limit: is {limit}; must be 0 (no clamp) or positive")
  run = dispatch.select("moe", backend, _MOE)
  return run(x_NxD, ids_NxA, weights_NxA, w_gate_ExDxF, w_up_ExDxF, w_down_ExFxD, limit)
