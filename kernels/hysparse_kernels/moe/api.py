"""The operation as callers see it."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from hysparse_kernels import dispatch
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import ragged, reference, xla

BACKENDS = {"reference": reference.moe, "xla": xla.moe, "ragged_dot": ragged.moe}


def moe(
  x_NxD: Float[Array, "N D"],
  ids_NxA: Int[Array, "N A"],
  weights_NxA: Float[Array, "N A"],
  w_gate: Float[Array, "E D F"] | Quantised,
  w_up: Float[Array, "E D F"] | Quantised,
  w_down: Float[Array, "E F D"] | Quantised,
  *,
  limit: float,
  released_rounding: bool = False,
  backend: str = "auto",
) -> Float[Array, "N D"]:
  """The sum of each token's routed experts, float32.

      y[n] = sum_a (weights[n, a] * swiglu(x[n] w_gate[e], x[n] w_up[e], limit)) w_down[e]

  with e = ids[n, a].

  Dropless: every choice is computed, however uneven the routing. An id outside 0..E-1 (use -1) is
  no expert: it adds nothing and gets no gradient. Products accumulate in float32, the activation
  and its weight are float32 and rounded to x's dtype for w_down, the sum over A is float32.

  Quantised weights are [E, outputs, inputs], the transpose of plain ones. Each expert is decoded
  where it is used, into x's dtype; the whole is never. A call with them is for inference: the
  backends made for speed refuse to be differentiated.

  Args:
    weights_NxA: float32 routing weights.
    w_gate: the checkpoint's w1 (transposed, if plain).
    w_up: w3.
    w_down: w2.
    limit: clamp of the activation (see `swiglu`), 0 for none.
    released_rounding: round where the released code does: what enters a matrix is quantised to
      "fp8" in blocks of 32 channels, what leaves it is rounded to x's dtype. Gradients pass
      straight through.

  Raises:
    ValueError: a negative limit; differentiation of a call with quantised weights.

  Source: arXiv 2609.19969 and the released code.
  """
  if limit < 0:
    raise ValueError(f"limit: is {limit}; must be 0 (no clamp) or positive")
  run = dispatch.select("moe", backend, BACKENDS)
  return run(x_NxD, ids_NxA, weights_NxA, w_gate, w_up, w_down, limit, released_rounding)
