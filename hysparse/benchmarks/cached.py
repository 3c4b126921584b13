"""A model, a cache and the calls that the inference benchmarks time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hysparse import config_file
from hysparse.cache.allocate import allocate
from hysparse.cache.state import Cache
from hysparse.config import Config
from hysparse.inference import segments
from hysparse.inference.sampling import Sampling, SamplingBatch
from hysparse.nn import model as model_lib
from hysparse.nn.batch import Batch
from hysparse.nn.unstack import unstack

_CHUNK = 1024  # tokens of a call that fills a cache


@dataclasses.dataclass(frozen=True)
class Bench:
  """A freshly initialised model whose layers have their own arrays."""

  config: Config
  graphdef: nnx.GraphDef
  state: nnx.State

  @classmethod
  def of(cls, path: str, overrides: Sequence[str] = (), *, separate_experts: bool = False) -> Bench:
    config = config_file.load(path, overrides)
    apart = unstack(*model_lib.create(config), separate_experts=separate_experts)
    return cls(config, *apart)

  def tokens(self, batch: int, count: int) -> jax.Array:
    """Random prompts [batch, count]."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, self.config.model.vocab_size, (batch, count)), jnp.int32)

  def empty(self, batch: int, max_tokens: int) -> Cache:
    return jax.block_until_ready(allocate(self.config, batch, max_tokens))

  def prefill(self, cache: Cache, tokens_BxS: jax.Array, prefill: str = "all_layers"):
    """(logits, cache) of whole prompts in one call; the cache given is used up."""
    return _prefill(self.graphdef, self.state, cache, tokens_BxS, prefill=prefill)

  def filled(self, batch: int, context: int, max_tokens: int) -> Cache:
    """A cache that holds `context` random tokens of each sequence."""
    cache, tokens_BxS = self.empty(batch, max_tokens), self.tokens(batch, context)
    for start in range(0, context, _CHUNK):
      _, cache = self.prefill(cache, tokens_BxS[:, start : start + _CHUNK])
    cache.check()
    return cache

  def decoder(self, batch: int, cache: Cache, steps: int):
    """A call that decodes `steps` greedy tokens of every sequence, from where it last stood."""
    held = [cache]
    slots = segments.Slots(
      token_B=jnp.zeros(batch, jnp.int32),
      left_B=jnp.full(batch, np.iinfo(np.int32).max, jnp.int32),
      stops_BxE=jnp.full((batch, 1), segments.NO_TOKEN, jnp.int32),
      choice=SamplingBatch.of([Sampling()] * batch),
      bad_B=jnp.zeros(batch, bool),
    )

    def call() -> jax.Array:
      held[0], _, tokens = segments.decode(self.graphdef, self.state, held[0], slots, steps=steps)
      return tokens

    return call


@functools.partial(jax.jit, static_argnames=("graphdef", "prefill"), donate_argnums=2)
def _prefill(graphdef, state, cache, tokens_BxS, *, prefill: str):
  batch = Batch.of(tokens_BxS, is_prompt=True)
  output = model_lib.forward(graphdef, state, batch, cache, prefill=prefill)
  return output.logits_BxNxV, output.cache
