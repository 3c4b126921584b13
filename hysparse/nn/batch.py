"""What a call of the model reads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """B rows of S tokens; a row holds one document or several packed ones.

  Documents start at row offsets that are multiples of `ModelConfig.alignment`. Padding behind a
  document counts as its tail (positions run on), so nothing real ever sees it.

  Attributes:
    tokens_BxS: token ids.
    positions_BxS: position of each token inside its document; 0 starts a new one.
    valid_BxS: False on padding, which reaches no expert and counts in no loss or load.
    is_prompt_BxS: True for prompt tokens, which may use fewer experts than generated ones.
  """

  tokens_BxS: Int[Array, "B S"]
  positions_BxS: Int[Array, "B S"]
  valid_BxS: Bool[Array, "B S"]
  is_prompt_BxS: Bool[Array, "B S"]

  @classmethod
  def of(cls, tokens_BxS: Int[Array, "B S"], *, is_prompt: bool = False) -> Batch:
    """One document per row, without padding."""
    B, S = tokens_BxS.shape
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    everywhere = jnp.ones((B, S), bool)
    return cls(tokens_BxS, positions, everywhere, everywhere if is_prompt else ~everywhere)

  def span(self, ratio: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Entries lo <= t < hi that each query may see: the complete groups of its own document."""
    row = jnp.arange(self.tokens_BxS.shape[1], dtype=jnp.int32)
    lo = (row - self.positions_BxS) // ratio
    return lo, lo + (self.positions_BxS + 1) // ratio
