"""The compiled parts of generation: a chunk of a prompt, and N steps of decoding at once.

A decode segment runs on the device from its first to its last token: the host reserves blocks
before it and reads its tokens behind it. Slots whose sequence has ended, or that are empty, take
part as padding.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache import slots as slots_lib
from hysparse.cache.state import Cache
from hysparse.inference import sampling
from hysparse.nn.batch import Batch
from hysparse.nn.model import forward

NO_TOKEN = sampling.NO_TOKEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """What decoding knows of each slot beside its cache.

  Attributes:
    token_B: the newest token, which the cache does not hold yet.
    left_B: tokens that may still come; 0 for a slot that is empty or done.
    stops_BxE: tokens that end the sequence, -1 for none.
    choice: how tokens are drawn.
    bad_B: the model gave logits that are not numbers.
  """

  token_B: Int[Array, "B"]
  left_B: Int[Array, "B"]
  stops_BxE: Int[Array, "B E"]
  choice: sampling.SamplingBatch
  bad_B: Bool[Array, "B"]

  @property
  def active_B(self) -> Bool[Array, "B"]:
    return self.left_B > 0


def draw(
  logits_BxV: Float[Array, "B V"], choice: sampling.SamplingBatch, position_B: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
  """Tokens for a position of each sequence, and which logits are not numbers."""
  drawn_B = sampling.sample(
    sampling.keys(choice.seed_B, position_B), sampling.distribution(logits_BxV, choice)
  )
  return drawn_B, drawn_B == NO_TOKEN


@functools.partial(jax.jit, static_argnames=("graphdef", "prefill", "more"), donate_argnums=2)
def prefill_chunk(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  cache: Cache,
  slots_N: Int[Array, "N"],
  tokens_NxS: Int[Array, "N S"],
  count_N: Int[Array, "N"],
  choice: sampling.SamplingBatch,
  *,
  prefill: str,
  more: bool,
) -> tuple[Cache, Int[Array, "N"], Bool[Array, "N"]]:
  """A piece of the prompts of some slots.

  Returns:
    The cache, the token that follows each prompt if this was its last piece, and which logits are
    not numbers.
  """
  batch = Batch.of(tokens_NxS, count_N, is_prompt=True)
  part = slots_lib.take(cache, slots_N)
  output = forward(graphdef, state, batch, part, prefill=prefill, more=more)
  cache = slots_lib.put(cache, slots_N, output.cache)
  if output.logits_BxNxV.shape[1] == 0:
    return cache, jnp.zeros_like(count_N), jnp.zeros(count_N.shape, bool)
  return cache, *draw(output.logits_BxNxV[:, 0], choice, output.cache.length_B)


@functools.partial(jax.jit, static_argnames=("graphdef", "steps"), donate_argnums=2)
def decode(
  graphdef: nnx.GraphDef, state: nnx.State, cache: Cache, slots: Slots, *, steps: int
) -> tuple[Cache, Slots, Int[Array, "B N"]]:
  """Up to `steps` tokens of every active slot; stops early when all are done.

  Returns:
    The cache, the slots, and the new tokens, -1 behind the end of a sequence.
  """

  def step(carry: tuple) -> tuple:
    i, cache, slots, out_BxN = carry
    active_B = slots.active_B
    batch = Batch.of(slots.token_B[:, None], active_B.astype(jnp.int32))
    output = forward(graphdef, state, batch, cache)
    token_B, bad_B = draw(output.logits_BxNxV[:, 0], slots.choice, output.cache.length_B)
    out_BxN = out_BxN.at[:, i].set(jnp.where(active_B, token_B, NO_TOKEN))
    stopped_B = (token_B[:, None] == slots.stops_BxE).any(-1) | bad_B
    slots = dataclasses.replace(
      slots,
      token_B=jnp.where(active_B, token_B, slots.token_B),
      left_B=jnp.where(active_B, jnp.where(stopped_B, 0, slots.left_B - 1), 0),
      bad_B=slots.bad_B | (active_B & bad_B),
    )
    return i + 1, output.cache, slots, out_BxN

  def going(carry: tuple) -> Array:
    return (carry[0] < steps) & carry[2].active_B.any()

  out_BxN = jnp.full((slots.token_B.shape[0], steps), NO_TOKEN, jnp.int32)
  _, cache, slots, out_BxN = jax.lax.while_loop(going, step, (jnp.int32(0), cache, slots, out_BxN))
  return cache, slots, out_BxN
