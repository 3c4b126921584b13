"""The contract of every top-k here: the best visible entries, ascending, ties to the lower one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NONE = -1  # a place in a selection that holds no entry


def span(
  lo: Int[Array, "B S"], hi: Int[Array, "B S"], ids: Int[Array, " T"]
) -> Bool[Array, "B S T"]:
  """Which of `ids` each query may see: lo <= id < hi."""
  return (ids >= lo[..., None]) & (ids < hi[..., None])


def ascending(ids: Int[Array, "... K"], valid: Bool[Array, "... K"]) -> Int[Array, "... K"]:
  """Sorts each row of ids, with -1 in the places of the invalid ones, which come last."""
  last = jnp.iinfo(jnp.int32).max
  ordered = jnp.sort(jnp.where(valid, ids, last), axis=-1)
  return jnp.where(ordered == last, NONE, ordered).astype(jnp.int32)


def rank(scores: Float[Array, "... T"], visible: Bool[Array, "... T"]) -> Float[Array, "... T"]:
  """Scores that order rightly: -inf where nothing may be selected.

  A NaN never selects, and -0.0 counts as 0.0 (top-k orders by bits; a relu of negative scores under
  negative weights gives -0.0).
  """
  scores = scores.astype(jnp.float32)  # bfloat16 top-k takes a slow path on CPU
  return jnp.where(visible & ~jnp.isnan(scores), jnp.where(scores == 0, 0.0, scores), -jnp.inf)


def top_visible(
  scores: Float[Array, "... T"], visible: Bool[Array, "... T"], top_k: int
) -> Int[Array, "... K"]:
  """Positions of the `top_k` best visible entries of each row, ascending; K = min(top_k, T).

  Equal scores go to the lower position, rows with fewer visible entries end in -1, a NaN score
  never selects.

  Source: arXiv 2609.19969, section 2.3; the tie rule is ours (the reference leaves it open).
  """
  best, ids = jax.lax.top_k(rank(scores, visible), min(top_k, scores.shape[-1]))
  return ascending(ids, best > -jnp.inf)
