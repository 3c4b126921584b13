"""Text from a model: one compiled loop without a cache.

Every step runs the whole row again, so a token costs as much as a prompt: right for a sample at the
end of training and as the yardstick that cached decoding must equal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from hysparse.nn.batch import Batch
from hysparse.nn.model import forward


def generate(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  prompt_S: Int[np.ndarray, " S"],
  tokens: int,
  *,
  length: int,
  temperature: float = 0.0,
  seed: int = 0,
  stop_id: int | None = None,
) -> Int[np.ndarray, " N"]:
  """Continues a prompt.

  Args:
    prompt_S: token ids; a prompt that leaves no room keeps its last tokens.
    tokens: how many new ones, at most.
    length: tokens of the row that is compiled for; prompt and new tokens together fit in it.
    temperature: 0 takes the likeliest token.
    stop_id: a token that ends the text (it is not returned).

  Raises:
    ValueError: an empty prompt, or no room for one token.
  """
  if tokens < 1 or len(prompt_S) < 1:
    raise ValueError("generate: needs a prompt of at least 1 token and at least 1 new token")
  tokens = min(tokens, length - 1)
  prompt_S = np.asarray(prompt_S)[-(length - tokens) :]
  row = np.zeros((1, length), np.int32)
  row[0, : len(prompt_S)] = prompt_S
  start = jnp.int32(len(prompt_S))
  stop = jnp.int32(-1 if stop_id is None else stop_id)
  row, end = _loop(
    graphdef, state, jnp.asarray(row), start, start + tokens, jnp.float32(temperature), stop,
    jax.random.key(seed),
  )  # fmt: skip
  return np.asarray(row)[0, len(prompt_S) : int(end)]


@functools.partial(jax.jit, static_argnums=0)
def _loop(
  graphdef, state, row_1xS: Int[Array, "1 S"], start, end, temperature, stop, key
) -> tuple[Array, Array]:
  """The row with its continuation, and where that ends."""
  prompt_tokens = jnp.arange(row_1xS.shape[1]) < start

  def step(carry):
    row, at, _ = carry
    whole = Batch.of(row)
    batch = Batch(whole.tokens_BxS, whole.positions_BxS, whole.valid_BxS, prompt_tokens[None])
    output = forward(graphdef, state, batch, logits_at=(at - 1)[None, None])
    logits = output.logits_BxNxV[0, 0]
    drawn = jax.random.categorical(
      jax.random.fold_in(key, at), logits / jnp.maximum(temperature, 1e-6)
    )
    token = jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)
    stopped = token == stop
    row = row.at[0, at].set(jnp.where(stopped, row[0, at], token))
    return row, jnp.where(stopped, at, at + 1), stopped

  def going(carry):
    return (carry[1] < end) & ~carry[2]

  row, at, _ = jax.lax.while_loop(going, step, (row_1xS, start, jnp.bool_(False)))
  return row, at
