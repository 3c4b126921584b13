"""The router: which experts each token uses, and how much."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import arguments


class Routing(NamedTuple):
  """Experts of each token, best first; float32 weights, 0 where the id is -1 (no expert).

  `scores_NxE` are those of all experts, unbiased, for the balance loss.
  """

  ids_NxA: Int[Array, "N A"]
  weights_NxA: Float[Array, "N A"]
  scores_NxE: Float[Array, "N E"]


def _sqrtsoftplus(logits: jax.Array) -> jax.Array:
  # Far below 0 softplus(z) is e^z: it underflows long before its root e^(z/2) does, and the plain
  # form then has the gradient 0 * inf.
  far = logits < -20
  root = jnp.sqrt(jax.nn.softplus(jnp.where(far, 0, logits)))
  return jnp.where(far, jnp.exp(jnp.where(far, logits, 0) / 2), root)


SCORE_FUNCTIONS = {
  "sqrtsoftplus": _sqrtsoftplus,
  "sigmoid": jax.nn.sigmoid,
  "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
}


def route(
  x_NxD: Float[Array, "N D"],
  w_gate_ExD: Float[Array, "E D"],
  bias_E: Float[Array, "*#N E"],
  *,
  top_k: int,
  score_func: str,
  gate_temp: float,
  norm_topk_prob: bool,
  route_scale: float,
  active_N: Int[Array, "N"] | None = None,
) -> Routing:
  """Chooses by score + bias and weighs by the score alone; everything in float32.

  Equal biased scores go to the lower expert. The chosen scores are divided by their sum + 1e-20 if
  `norm_topk_prob` and the token uses more than one expert, then multiplied by `route_scale`. The
  choice passes no gradient, so the bias gets none.

  Args:
    bias_E: added to the scores for the choice only; one row for all tokens or one for each.
    top_k: A, the most experts that a token uses.
    score_func: "sqrtsoftplus", "sigmoid" or "softmax" (over all experts).
    gate_temp: the logits are divided by this.
    active_N: how many of its best experts each token uses, 0..A; None for A. A token that uses n
      is routed exactly as with `top_k` n.

  Raises:
    ValueError: an unknown score function, or more active experts than there are.

  Source: arXiv 2609.19969 and the released code.
  """
  experts = w_gate_ExD.shape[0]
  if score_func not in SCORE_FUNCTIONS:
    raise ValueError(f"score_func: is '{score_func}'; must be one of {', '.join(SCORE_FUNCTIONS)}")
  arguments.whole("top_k", top_k, 1, experts)
  logits_NxE = jnp.einsum(
    "nd,ed->ne",
    x_NxD.astype(jnp.float32),
    w_gate_ExD.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  scores_NxE = SCORE_FUNCTIONS[score_func](logits_NxE / gate_temp)
  _, ids_NxA = jax.lax.top_k(jax.lax.stop_gradient(scores_NxE + bias_E), top_k)
  weights_NxA = jnp.take_along_axis(scores_NxE, ids_NxA, axis=1)
  active_Nx1 = jnp.full((x_NxD.shape[0], 1), top_k) if active_N is None else active_N[:, None]
  used_NxA = jnp.arange(top_k) < active_Nx1
  weights_NxA = jnp.where(used_NxA, weights_NxA, 0)
  if norm_topk_prob and top_k > 1:
    total_Nx1 = weights_NxA.sum(1, keepdims=True) + 1e-20
    # Its gradient has the square of the total: a power of two keeps that in range and is exact.
    shares_NxA = (weights_NxA * 2.0**40) / (total_Nx1 * 2.0**40)
    weights_NxA = jnp.where(active_Nx1 > 1, shares_NxA, weights_NxA)
  return Routing(jnp.where(used_NxA, ids_NxA, -1), weights_NxA * route_scale, scores_NxE)
