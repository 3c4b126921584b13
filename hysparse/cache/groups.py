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
  """Contributions of tokens: of those since the last complete group, length % r rows are in use."""

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


def complete(
  partial: PartialGroup,
  call: PartialGroup,
  length_B: Int[Array, "B"],
  count_B: Int[Array, "B"],
  ratio: int,
) -> Grouped:
  """The groups that the `count` first tokens of a call complete, after `length` tokens.

  Args:
    call: contributions of the S tokens of the call.
  """
  S = call.kv_BxRxC.shape[1]
  N = -(-S // ratio)
  first_Bx1 = (length_B // ratio)[:, None]
  kv, score = _tokens(partial, call, length_B, 0, first_Bx1 * ratio + jnp.arange(N * ratio), ratio)
  ids_BxN = first_Bx1 + jnp.arange(N)
  return Grouped(
    kv.reshape(-1, N, ratio, kv.shape[-1]),
    score.reshape(-1, N, ratio, kv.shape[-1]),
    ids_BxN,
    (ids_BxN + 1) * ratio <= (length_B + count_B)[:, None],
  )


def remainder(
  partial: PartialGroup,
  call: PartialGroup,
  length_B: Int[Array, "B"],
  first_B: Int[Array, "B"],
  count_B: Int[Array, "B"],
  ratio: int,
) -> PartialGroup:
  """What remains unfinished after the `count` first tokens of a call.

  Args:
    call: contributions of N tokens of the call, from the `first`-th on.
  """
  end_B = length_B + count_B
  positions_BxR = (end_B - end_B % ratio)[:, None] + jnp.arange(ratio - 1)
  return PartialGroup(*_tokens(partial, call, length_B, first_B, positions_BxR, ratio))


def _tokens(
  partial: PartialGroup,
  call: PartialGroup,
  length_B: Int[Array, "B"],
  first_B: Int[Array, "B"] | int,
  positions_BxP: Int[Array, "B P"],
  ratio: int,
) -> tuple[jax.Array, jax.Array]:
  """Contributions of tokens at positions: of carried ones or of those of the call."""
  carried, N = ratio - 1, call.kv_BxRxC.shape[1]
  before_BxP = positions_BxP - (length_B - length_B % ratio)[:, None]
  inside_BxP = carried + positions_BxP - (length_B + first_B)[:, None]
  at_BxP = jnp.where(positions_BxP < length_B[:, None], before_BxP, inside_BxP)
  at_BxPx1 = jnp.clip(at_BxP, 0, carried + N - 1)[..., None]
  joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), partial, call)
  return tuple(
    jnp.take_along_axis(x, at_BxPx1, axis=1) for x in (joined.kv_BxRxC, joined.score_BxRxC)
  )
