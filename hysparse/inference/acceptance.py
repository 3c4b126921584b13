"""Speculative sampling: which drafted tokens stand, and the token that follows them.

Draft i is accepted with probability min(1, p_i / q_i), p_i being what the model gives it and q_i
what it was drawn with. The first one refused is replaced by a draw from max(p - q, 0), normalised;
after the last one verified, a token is drawn from p. Then every emitted token has the distribution
p, whatever q is (arXiv 2211.17192, theorem 1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from hysparse.inference.sampling import ACCEPT, draw, keys, uniform


def accept(
  target_BxMxV: Float[Array, "B N+1 V"],
  proposal_BxNxV: Float[Array, "B N V"],
  drafts_BxN: Int[Array, "B N"],
  limit_B: Int[Array, "B"],
  seed_B: UInt[Array, "B"],
  position_B: Int[Array, "B"],
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
  """How many drafts stand, and the token after them.

  With temperature 0 a draft stands while it is the likeliest token and the token after them is the
  likeliest one there. With no draft verified, the token is the one that `sample` draws from the
  target's first row with `keys(seed, position)`: the one that plain decoding gives.

  Args:
    target_BxMxV: log-probabilities (`sampling.distribution`) of the model for the position of each
      draft and for the one after the last. Row i is given drafts 0 .. i-1.
    proposal_BxNxV: log-probabilities from which each draft was drawn, on the stream DRAFT; a draft
      that was the likeliest one has all mass on it.
    drafts_BxN: N >= 1; an id outside the vocabulary is never accepted.
    limit_B: how many drafts of a row may stand, clipped to 0 .. N. It may depend on drafts before
      the first that it leaves out, not on that one or later: then the tokens would be biased.
    seed_B: of each sequence.
    position_B: absolute position of the first draft.

  Returns:
    Accepted drafts, 0 .. limit, and the next token, int32. The token is sampling.NO_TOKEN if the
    target is NaN there, or if the proposal of a draft that may stand is.

  Raises:
    ValueError: shapes that do not fit.
  """
  B, N = drafts_BxN.shape
  V = target_BxMxV.shape[-1]
  if N < 1 or target_BxMxV.shape != (B, N + 1, V) or proposal_BxNxV.shape != (B, N, V):
    raise ValueError(
      f"accept: target {target_BxMxV.shape}, proposal {proposal_BxNxV.shape} and drafts"
      f" {drafts_BxN.shape}; must be [B, N+1, V], [B, N, V] and [B, N] with N at least 1"
    )
  places_BxN = position_B[:, None] + jnp.arange(N)
  accept_keys_BxN = keys(seed_B[:, None], places_BxN, ACCEPT)
  u_BxN = jax.vmap(jax.vmap(lambda key: uniform(key, ())))(accept_keys_BxN)
  known_BxN = (drafts_BxN >= 0) & (drafts_BxN < V)
  at = jnp.where(known_BxN, drafts_BxN, 0)[..., None]
  p_BxN = jnp.exp(jnp.take_along_axis(target_BxMxV[:, :N], at, axis=-1)[..., 0])
  q_BxN = jnp.exp(jnp.take_along_axis(proposal_BxNxV, at, axis=-1)[..., 0])
  limit_B = jnp.clip(limit_B, 0, N)
  # A NaN on either side compares false, so it ends the accepted drafts.
  stands_BxN = known_BxN & (jnp.arange(N) < limit_B[:, None]) & (u_BxN * q_BxN < p_BxN)
  accepted_B = _leading(stands_BxN)

  row = jnp.arange(B)
  p_BxV = jnp.exp(target_BxMxV[row, accepted_B])
  q_BxV = jnp.exp(proposal_BxNxV[row, jnp.minimum(accepted_B, N - 1)])
  refused_Bx1 = (accepted_B < limit_B)[:, None]
  weights_BxV = jnp.where(refused_Bx1, _residual(p_BxV, q_BxV), p_BxV)
  return accepted_B, draw(keys(seed_B, position_B + accepted_B), weights_BxV)


def _residual(p_BxV: Float[Array, "B V"], q_BxV: Float[Array, "B V"]) -> Float[Array, "B V"]:
  """max(p - q, 0), not normalised; p where rounding leaves nothing of it."""
  over_BxV = jnp.maximum(p_BxV - q_BxV, 0)
  return jnp.where(over_BxV.max(-1, keepdims=True) == 0, p_BxV, over_BxV)


def verify_length(
  confidence_BxN: Float[Array, "B N"], min_acceptance: float = 0.3
) -> Int[Array, "B"]:
  """How many drafts are worth verifying: those that will probably all stand.

  Keeps the drafts up to the last that stands, with all before it, with probability at least
  `min_acceptance`. Confidence i is read from the drafts before i, so the length may be a limit of
  `accept`.

  Args:
    confidence_BxN: raw logit that a draft is accepted given that those before it are; a NaN ends
      the drafts kept.
    min_acceptance: 0 keeps all; higher values verify less.

  Raises:
    ValueError: min_acceptance is not a probability.
  """
  if not 0 <= min_acceptance <= 1:
    raise ValueError(f"min_acceptance: {min_acceptance!r}; must be a number from 0 to 1")
  return _leading(jnp.cumprod(jax.nn.sigmoid(confidence_BxN), axis=-1) >= min_acceptance)


def _leading(true_BxN: Array) -> Int[Array, "B"]:
  """How many entries of a row are true before the first that is not."""
  return jnp.cumprod(true_BxN.astype(jnp.int32), axis=-1).sum(-1)
