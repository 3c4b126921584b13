"""How evenly experts are used: their load, and the loss that keeps sequences from starving any."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def expert_load(ids: Int[Array, "..."], experts: int) -> Int[Array, "E"]:
  """How often each expert is chosen, int32; ids outside 0..E-1 (no expert) count nowhere."""
  flat = ids.reshape(-1)
  return jax.ops.segment_sum(jnp.ones_like(flat, jnp.int32), flat, experts)  # drops what is outside


def sequence_balance_loss(
  scores_BxSxE: Float[Array, "B S E"],
  ids_BxSxA: Int[Array, "B S A"],
  valid_BxS: Bool[Array, "B S"],
) -> Float[Array, ""]:
  """Mean over sequences of sum_e f_e P_e; 1 when all experts are used alike.

      f_e = E / (choices in the sequence) * (choices of e)               no gradient
      P_e = mean over tokens of score_e / (sum of the token's scores)

  Only valid tokens count; with A experts for each of T tokens there are A T choices. A sequence
  without a valid token counts as 0.

  Source: DeepSeek-V3, arXiv 2412.19437, equations 17-20.
  """
  experts = scores_BxSxE.shape[-1]
  used_BxSxA = jnp.where(valid_BxS[..., None], ids_BxSxA, -1)
  load_BxE = jax.vmap(lambda ids: expert_load(ids, experts))(used_BxSxA)
  choices_Bx1 = jnp.maximum(load_BxE.sum(1, keepdims=True), 1)
  share_BxE = load_BxE * experts / choices_Bx1
  normalised = scores_BxSxE / (scores_BxSxE.sum(-1, keepdims=True) + 1e-20)
  tokens_Bx1 = jnp.maximum(valid_BxS.sum(1, keepdims=True), 1)
  mean_BxE = jnp.where(valid_BxS[..., None], normalised, 0).sum(1) / tokens_Bx1
  return (share_BxE * mean_BxE).sum(-1).mean()
