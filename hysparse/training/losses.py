"""What training minimises, and the head computed with it in token blocks.

loss = cross-entropy
     + balance_loss * sum over layers of the routers' sequence-wise balance loss
     + indexer_loss * sum over index sources of the KL that trains their indexer

The report describes no loss for the indexer; ours is in `nn/indexer.py`. It reaches the indexer's
own parameters only, so its weight does not trade against the language model.

Source: arXiv 2609.19969, section 3 (balance); the router bias rule is in training/state.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from hysparse.config import Config
from hysparse.nn.batch import Batch
from hysparse.nn.model import Model


def make_batch(arrays: Mapping[str, Array]) -> Batch:
  """The model's part of a training batch (see training/data/pipeline.py)."""
  return Batch(
    tokens_BxS=arrays["tokens"],
    positions_BxS=arrays["positions"],
    valid_BxS=arrays["valid"],
    is_prompt_BxS=arrays["is_prompt"],
  )


def token_losses(
  model: Model, x_BxSxD: Float[Array, "B S D"], targets_BxS: Int[Array, "B S"], block: int
) -> Float[Array, "B S"]:
  """Cross-entropy of each target in nats; the logits of `block` tokens exist at a time."""
  B, S, D = x_BxSxD.shape
  n = -(-B * S // block)
  pad = n * block - B * S
  x = jnp.pad(x_BxSxD.reshape(B * S, D), ((0, pad), (0, 0))).reshape(n, block, D)
  targets = jnp.pad(targets_BxS.reshape(B * S), (0, pad)).reshape(n, block)

  @jax.checkpoint
  def losses(xs):
    x, targets = xs
    logits = model.logits(x)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen

  return jax.lax.map(losses, (x, targets)).reshape(-1)[: B * S].reshape(B, S)


def masked_mean(x_BxS: Float[Array, "B S"], mask_BxS: Bool[Array, "B S"]) -> Float[Array, ""]:
  return jnp.where(mask_BxS, x_BxS, 0.0).sum() / jnp.maximum(mask_BxS.sum(), 1)


def loss_fn(
  graphdef: nnx.GraphDef,
  params: nnx.State,
  buffers: nnx.State,
  arrays: Mapping[str, Array],
  config: Config,
) -> tuple[Float[Array, ""], dict[str, Array]]:
  """The loss of one batch, to be differentiated by `params`.

  Returns:
    The loss, and: "ce" (nats per target), "balance", "indexer_kl" (means over layers and index
    sources), "load" [layers, experts] (valid tokens each routed expert got).
  """
  model: Model = nnx.merge(graphdef, params, buffers)
  hidden = model.hidden(make_batch(arrays))
  told = hidden.aux
  losses = token_losses(model, hidden.x_BxSxD, arrays["targets"], config.train.loss_block)
  ce = masked_mean(losses, arrays["mask"])
  loss = ce + config.train.balance_loss * told.balance_loss.sum()
  loss += config.train.indexer_loss * told.indexer_loss.sum()
  sources = max(1, len(config.model.layers.index_sources))
  return loss, {
    "ce": ce,
    "balance": told.balance_loss.mean(),
    "indexer_kl": told.indexer_loss.sum() / sources,
    "load": told.load_E,
  }
