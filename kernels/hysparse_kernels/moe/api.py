"""The operation as callers see it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import arguments, dispatch
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import ragged, reference, xla
from hysparse_kernels.moe.matrices import Separate

BACKENDS = {"reference": reference.moe, "xla": xla.moe, "ragged_dot": ragged.moe}


def moe(
  x_NxD: Float[Array, "N D"],
  ids_NxA: Int[Array, "N A"],
  weights_NxA: Float[Array, "N A"],
  w_gate: Float[Array, "E D F"] | Quantised | Separate,
  w_up: Float[Array, "E D F"] | Quantised | Separate,
  w_down: Float[Array, "E F D"] | Quantised | Separate,
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
  where it is used, into x's dtype; the whole is never. `Separate` ones are fast for few tokens on
  the CPU. A call with either is for inference: the backends made for speed refuse to be
  differentiated.

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
    ValueError: arrays whose shapes or dtypes do not fit each other, a limit that is no number from
      0 up; differentiation of a call with quantised or separate weights.

  Source: arXiv 2609.19969 and the released code.
  """
  run = dispatch.select("moe", backend, BACKENDS)
  arrays = {"x_NxD": x_NxD, "ids_NxA": ids_NxA, "weights_NxA": weights_NxA}
  matrices = (("w_gate", w_gate, "DxF"), ("w_up", w_up, "DxF"), ("w_down", w_down, "FxD"))
  for name, weights, axes in matrices:
    arrays[f"{name}_Ex{axes[::-1] if isinstance(weights, Quantised) else axes}"] = weights
  arguments.sizes(**arrays)
  arguments.floats(x_NxD=x_NxD, weights_NxA=weights_NxA)
  arguments.integers(ids_NxA=ids_NxA)
  x_NxD, weights_NxA, w_gate, w_up, w_down = jax.tree.map(
    jnp.asarray, (x_NxD, weights_NxA, w_gate, w_up, w_down)
  )
  ids_NxA = jnp.asarray(ids_NxA, jnp.int32)
  limit = arguments.real("limit", limit, 0)
  return run(x_NxD, ids_NxA, weights_NxA, w_gate, w_up, w_down, limit, released_rounding)
