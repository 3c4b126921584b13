"""How every parameter begins, in one table.

The report gives no initialisation; these values are ours. Matrices keep the variance of their
input; what writes into the residual streams starts smaller by the square root of the number of
sublayers, so that depth does not change the scale of the streams.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EMBEDDING_STD = 0.5
HEAD_STD = 0.5  # times d_model^-0.5: logits start small
ENGRAM_TABLE_STD = 0.5
MIX_SCALE = 0.01  # of the stream mix; 1.0 diverges
MIX_IDENTITY = 4.0  # on the diagonal of the stream mix, before the softmax


def matrix(key: jax.Array, shape: tuple[int, ...], gain: float = 1.0) -> Float[Array, "..."]:
  """Normal with standard deviation gain / sqrt(inputs); the inputs are the axis before the last."""
  return gain * shape[-2] ** -0.5 * jax.random.normal(key, shape, jnp.float32)


def residual_gain(layers: int) -> float:
  """Gain of a matrix whose result is added to the streams (two of them a layer)."""
  return (2 * layers) ** -0.5


def table(key: jax.Array, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
  """Normal rows of a table that is looked up."""
  return std * jax.random.normal(key, shape, jnp.float32)


def mix_base(streams: int) -> Float[Array, " mix"]:
  """Start of the stream mix: an even fold, a plain residual write, streams kept nearly apart."""
  even = math.log(1 / (streams - 1)) if streams > 1 else 4.0  # logit(1 / M)
  pre, post = jnp.full((streams,), even), jnp.zeros((streams,))
  comb = MIX_IDENTITY * jnp.eye(streams).reshape(-1)
  return jnp.concatenate([pre, post, comb]).astype(jnp.float32)
