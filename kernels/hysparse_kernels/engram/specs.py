"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call of `gate`."""

  name: str
  tokens: int = 33
  streams: int = 4
  width: int = 16
  dead: float = 0.0  # share of dead tokens
  x_scale: float = 1.0
  dtype: str = "float32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `gate`."""
    rng = np.random.default_rng(seed)
    streams = (self.tokens, self.streams, self.width)

    def normal(*shape, scale=1.0, mean=0.0, dtype="float32"):
      return jnp.asarray(mean + scale * rng.normal(size=shape), dtype)

    return {
      "x_NxMxD": normal(*streams, scale=self.x_scale, dtype=self.dtype),
      "key_NxMxD": normal(*streams, dtype=self.dtype),
      "value_NxD": normal(self.tokens, self.width, dtype=self.dtype),
      "q_weight_MxD": normal(self.streams, self.width, scale=0.5, mean=1.0),
      "k_weight_MxD": normal(self.streams, self.width, scale=0.5, mean=1.0),
      "dead_N": jnp.asarray(rng.random(self.tokens) < self.dead),
      "eps": 1e-20,
    }


SPECS = (
  Spec("streams"),
  Spec("odd_sizes_and_dead_tokens", tokens=67, streams=3, width=10, dead=0.3),
  Spec("one_token", tokens=1),
  Spec("one_stream", streams=1, width=8),
  Spec("large_streams", x_scale=300.0),
  Spec("bfloat16", width=32, dtype="bfloat16"),
)
