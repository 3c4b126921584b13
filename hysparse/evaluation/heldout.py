"""Held-out loss in bits per byte: comparable between tokenizers, unlike the loss per token."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from hysparse.nn.model import Model
from hysparse.training.losses import make_batch, token_losses


def bits_per_byte(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batches: Iterable[Mapping[str, np.ndarray]],
  byte_lengths: Int[np.ndarray, " V"],
  *,
  loss_block: int = 512,
) -> dict[str, float]:
  """Loss over all masked targets of the batches.

  Args:
    byte_lengths: UTF-8 bytes that each token id stands for; 0 for special tokens, whose bits count
      all the same.

  Returns:
    "bits_per_byte", "bits_per_token", "tokens" and "bytes".
  """
  nats = tokens = total_bytes = 0.0
  for arrays in batches:
    nats += float(_nats(graphdef, state, dict(arrays), loss_block))
    tokens += float(arrays["mask"].sum())
    total_bytes += float(byte_lengths[arrays["targets"]][arrays["mask"]].sum())
  bits = nats / math.log(2)
  return {
    "bits_per_byte": bits / max(total_bytes, 1),
    "bits_per_token": bits / max(tokens, 1),
    "tokens": tokens,
    "bytes": total_bytes,
  }


@functools.partial(jax.jit, static_argnums=(0, 3))
def _nats(graphdef, state, arrays: Mapping[str, Array], loss_block: int) -> Array:
  model: Model = nnx.merge(graphdef, state)
  x_BxSxD = model.hidden(make_batch(arrays)).x_BxSxD
  losses = token_losses(model, x_BxSxD, arrays["targets"], loss_block)
  return jnp.where(arrays["mask"], losses, 0.0).sum()
