"""The operation as callers see it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hysparse_kernels import arguments, dispatch
from hysparse_kernels.engram import reference, xla

_GATE = {"reference": reference.gate, "xla": xla.gate}


def gate(
  x_NxMxD: Float[Array, "N M D"],
  key_NxMxD: Float[Array, "N M D"],
  value_NxD: Float[Array, "N D"],
  q_weight_MxD: Float[Array, "M D"],
  k_weight_MxD: Float[Array, "M D"],
  *,
  eps: float,
  dead_N: Bool[Array, "N"] | None = None,
  backend: str = "auto",
) -> Float[Array, "N M D"]:
  """The streams with each token's value added, as far as each stream agrees with its key.

      dot  = sum_d x * q_weight * k_weight * key / (rms(x) * rms(key) * sqrt(D))
      x'_m = x_m + sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value

  Computed in float32, the result has x's dtype. The sign of -0.0 counts as negative; where |dot| is
  at the floor no gradient passes through the gate.

  Args:
    eps: joins the mean squares of both norms.
    dead_N: tokens that get nothing (images and their delimiters).

  Raises:
    ValueError: shapes that do not fit each other, an eps that is no number from 0 up.
    BackendError: a backend that is not there or cannot run here.

  Source: arXiv 2609.19969 and the released code.
  """
  arguments.sizes(
    x_NxMxD=x_NxMxD, key_NxMxD=key_NxMxD, value_NxD=value_NxD, q_weight_MxD=q_weight_MxD,
    k_weight_MxD=k_weight_MxD, **({} if dead_N is None else {"dead_N": dead_N}),
  )  # fmt: skip
  eps = arguments.real("eps", eps, 0)
  if dead_N is None:
    dead_N = jnp.zeros(x_NxMxD.shape[0], bool)
  # Nothing of a dead token's value comes through, were it no number.
  value_NxD = jnp.where(dead_N[:, None], 0, value_NxD)
  run = dispatch.select("engram.gate", backend, _GATE)
  return run(x_NxMxD, key_NxMxD, value_NxD, q_weight_MxD, k_weight_MxD, dead_N, eps)
