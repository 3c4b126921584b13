"""Decoding with drafts: the draft layers guess a few tokens, the model verifies them in one call.

A step drafts a block behind the newest token, runs that token and the drafts through the model at
once, keeps as many as the model would have produced itself and one token more, and settles the
cache on those: rejected tokens leave nothing in rings, unfinished groups or the n-gram history, and
their entries lie beyond the sequence's length. The output is the model's own: the same tokens as
plain decoding when greedy, the same distribution when sampling.

Source: arXiv 2609.19969, section 3 (DSpark); arXiv 2211.17192 for the sampling.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from hysparse.cache.settle import settle
from hysparse.cache.state import Cache
from hysparse.inference import acceptance, sampling
from hysparse.inference.segments import NO_TOKEN, Slots
from hysparse.nn.batch import Batch
from hysparse.nn.model import draft, forward


@functools.partial(
  jax.jit, static_argnames=("graphdef", "steps", "min_acceptance"), donate_argnums=2
)
def speculate(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  cache: Cache,
  slots: Slots,
  *,
  steps: int,
  min_acceptance: float,
) -> tuple[Cache, Slots, Int[Array, "B N"], Int[Array, "B"]]:
  """Up to `steps` drafted blocks of every active slot; as `segments.decode`.

  Args:
    min_acceptance: verifies drafts as long as all of them stand with this probability, by the draft
      layers' own confidence; 0 verifies all.

  Returns:
    The cache, the slots, the new tokens (-1 behind the end of a sequence), and how many calls of
    the model each slot took part in.
  """

  def step(carry: tuple) -> tuple:
    i, cache, slots, out_BxN, calls_B = carry
    active_B = slots.active_B
    drafted = draft(graphdef, state, cache, slots.token_B)
    drafts_BxN = drafted.ids_BxN[:, 1:]
    limit_B = acceptance.verify_length(drafted.confidence_BxN, min_acceptance)
    limit_B = jnp.minimum(limit_B, slots.left_B - 1)
    call = Batch.of(drafted.ids_BxN, jnp.where(active_B, limit_B + 1, 0))
    output = forward(graphdef, state, call, cache, defer=True, all_positions=True)
    # A draft layer's ring that is not the sequence's costs no token its place, but is told.
    error_B = output.cache.error_B | (active_B & drafted.error_B)

    target = sampling.distribution(output.logits_BxNxV, slots.choice)
    ids_V = jnp.arange(target.shape[-1])
    proposal = jnp.where(drafts_BxN[..., None] == ids_V, 0.0, -jnp.inf)  # drafts are not drawn
    accepted_B, next_B = acceptance.accept(
      target, proposal, drafts_BxN, limit_B, slots.choice.seed_B, cache.length_B + 1
    )
    cache = dataclasses.replace(output.cache, error_B=error_B)
    cache = settle(cache, output.pending, jnp.where(active_B, accepted_B + 1, 0))

    at = jnp.arange(drafts_BxN.shape[1] + 1)
    new_BxM = jnp.pad(drafts_BxN, ((0, 0), (0, 1)))
    new_BxM = jnp.where(at == accepted_B[:, None], next_B[:, None], new_BxM)
    came_BxM = at <= accepted_B[:, None]
    stop_BxM = came_BxM & (new_BxM[..., None] == slots.stops_BxE[:, None]).any(-1)
    came_BxM &= jnp.cumsum(stop_BxM, axis=1) - stop_BxM == 0  # nothing behind the first stop
    came_BxM &= active_B[:, None]
    bad_B = active_B & (next_B == NO_TOKEN)
    count_B = came_BxM.sum(1)
    done_B = (came_BxM & stop_BxM).any(1) | bad_B
    written_B = (out_BxN != NO_TOKEN).sum(1)
    place_BxM = jnp.where(came_BxM, written_B[:, None] + at, out_BxN.shape[1])
    rows = jnp.arange(len(written_B))[:, None]
    slots = dataclasses.replace(
      slots,
      token_B=jnp.where(active_B, next_B, slots.token_B),
      left_B=jnp.where(active_B & ~done_B, slots.left_B - count_B, 0),
      bad_B=slots.bad_B | bad_B,
    )
    out_BxN = out_BxN.at[rows, place_BxM].set(new_BxM, mode="drop")
    return i + 1, cache, slots, out_BxN, calls_B + active_B

  def going(carry: tuple) -> Array:
    return (carry[0] < steps) & carry[2].active_B.any()

  B = slots.token_B.shape[0]
  width = steps * (nnx.merge(graphdef, state).config.draft_block + 1)
  out_BxN = jnp.full((B, width), NO_TOKEN, jnp.int32)
  carry = (jnp.int32(0), cache, slots, out_BxN, jnp.zeros(B, jnp.int32))
  _, cache, slots, out_BxN, calls_B = jax.lax.while_loop(going, step, carry)
  return cache, slots, out_BxN, calls_B
