"""The group of tokens that a compressing source has begun and not finished.

A source with ratio r makes one entry of r consecutive tokens. A call may begin and end anywhere, so
what the tokens of an unfinished group contribute (key-value and score, float32) waits here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialGroup:
  """Contributions of the tokens since the last complete group: length % r rows are in use."""

  kv_BxRxC: Float[Array, "B R C"]
  score_BxRxC: Float[Array, "B R C"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
  """Groups that a call completes: N = ceil(S / r) places, of which the `done` ones are real."""

  kv_BxNxRxC: Float[Array, "B N R C"]
  score_BxNxRxC: Float[Array, "B N R C"]
  ids_BxN: Int[Array, "B N"]
  done_BxN: Bool[Array, "B N"]


def advance(
  partial: PartialGroup,
  kv_BxSxC: Float[Array, "B S C"],
  score_BxSxC: Float[Array, "B S C"],
  length_B: Int[Array, "B"],
  count_B: Int[Array, "B"],
  ratio: int,
) -> tuple[Grouped, PartialGroup]:
  """Adds the `count` first tokens of a call to a sequence of `length`.

  Returns:
    The groups that are complete now, and what remains unfinished.
  """
  S, carried = kv_BxSxC.shape[1], ratio - 1
  start_Bx1 = (length_B - length_B % ratio)[:, None]  # first token of the unfinished group
  end_B = length_B + count_B

  def tokens(positions_BxP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Contributions of tokens from `start` on: carried ones first, then those of this call."""
    past = positions_BxP < length_B[:, None]
    at = jnp.where(past, positions_BxP - start_Bx1, carried + positions_BxP - length_B[:, None])
    at = jnp.clip(at, 0, carried + S - 1)[..., None]
    joined = (
      jnp.concatenate([partial.kv_BxRxC, kv_BxSxC], axis=1),
      jnp.concatenate([partial.score_BxRxC, score_BxSxC], axis=1),
    )
    return tuple(jnp.take_along_axis(x, at, axis=1) for x in joined)

  N = -(-S // ratio)
  kv, score = tokens(start_Bx1 + jnp.arange(N * ratio))
  ids_BxN = start_Bx1 // ratio + jnp.arange(N)
  grouped = Grouped(
    kv.reshape(-1, N, ratio, kv.shape[-1]),
    score.reshape(-1, N, ratio, kv.shape[-1]),
    ids_BxN,
    (ids_BxN + 1) * ratio <= end_B[:, None],
  )
  left = PartialGroup(*tokens((end_B - end_B % ratio)[:, None] + jnp.arange(carried)))
  return grouped, left
