"""Small models for tests: every mechanism, tiny widths, weights of realistic scale."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hysparse.config import Config
from hysparse.nn.batch import Batch
from hysparse.nn.model import abstract, forward

# One layer of each kind that the released model has, with a bar, candidates and Engram.
EVERY_MECHANISM = "swa full/2 reuse | full/1+candidates reuse reindex reuse"


def config(schedule: str = EVERY_MECHANISM, *, train: dict | None = None, **model) -> Config:
  """A model of 32 channels on `schedule`; other fields as given."""
  fields = {
    "schedule": schedule,
    "vocab_size": 64,
    "d_model": 32,
    "n_heads": 4,
    "head_dim": 16,
    "rope_dim": 8,
    "q_rank": 16,
    "o_groups": 2,
    "o_rank": 16,
    "window": 4,
    "top_k": 3,
    "index_heads": 3,
    "index_dim": 8,
    "candidate_blocks": 3,
    "candidate_block_size": 2,
    "n_experts": 4,
    "experts_per_token": 2,
    "expert_dim": 16,
    "streams": 3,
    "engram_heads": 2,
    "engram_dim": 4,
    "engram_vocab": 50,
    "max_positions": 65536,
  } | model
  if fields.get("residual") == "plain":
    fields["streams"] = 1
  return Config.from_dict(
    {"model": fields, "data": {"seq_len": 48, "batch_size": 2}, "train": train or {}}
  )


@functools.cache
def model(cfg: Config, seed: int = 0) -> tuple[nnx.GraphDef, nnx.State]:
  """(graphdef, state) with random weights of realistic scale, made on the host.

  Norm weights are far from 1 and the stream mixes far from their start, as in trained models, where
  faults show that unit Gaussians hide. (Compiling the real initialisation takes longer than all
  else in most tests.)
  """
  graphdef, state = abstract(cfg)
  rng = np.random.default_rng(seed)
  flat = nnx.to_flat_state(state)
  leaves = [(path, leaf.replace(_weight(rng, path, leaf.get_raw_value()))) for path, leaf in flat]
  return graphdef, nnx.from_flat_state(leaves)


def _weight(rng: np.random.Generator, path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  shape, name, owner = leaf.shape, path[-1], path[-2] if len(path) > 1 else ""
  if name == "token_map":
    return jnp.arange(shape[0], dtype=jnp.int32) // 2  # pairs of tokens normalise alike
  normal = rng.normal(size=shape)
  if "norm" in str(owner) or name in ("q_weight", "k_weight"):
    value = np.exp(0.5 * normal)
  elif name in ("base", "sink"):
    value = normal
  elif name == "scale":
    value = 0.5 + 0.1 * normal
  elif name in ("bias", "bias_image"):
    value = 0.05 * normal
  elif name == "fn":
    value = normal * shape[-1] ** -0.5
  elif name in ("table", "start", "newline", "end") or {name, owner} & {"embed", "head"}:
    value = 0.5 * normal
  else:
    value = normal * shape[-2] ** -0.5
  return jnp.asarray(value, jnp.float32)


compiled = jax.jit(forward, static_argnums=0, static_argnames=("all_positions", "capture"))


def logits(cfg: Config, batch: Batch, seed: int = 0) -> np.ndarray:
  """[B, S, V] logits of every position."""
  graphdef, state = model(cfg, seed)
  return np.asarray(compiled(graphdef, state, batch, all_positions=True).logits_BxNxV)


def tokens(cfg: Config, batch: int, length: int, seed: int = 0) -> jnp.ndarray:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, cfg.model.vocab_size, (batch, length)), jnp.int32)


def arrays(batch: Batch) -> dict[str, jax.Array]:
  """A training batch that predicts the next token everywhere."""
  return {
    "tokens": batch.tokens_BxS,
    "targets": jnp.roll(batch.tokens_BxS, -1, axis=1),
    "positions": batch.positions_BxS,
    "mask": batch.valid_BxS,
    "valid": batch.valid_BxS,
    "is_prompt": batch.is_prompt_BxS,
  }
