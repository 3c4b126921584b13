"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `mix_scale` is how strongly the coefficients depend on the streams."""

  name: str
  tokens: int = 33
  streams: int = 4
  width: int = 16
  iters: int = 4
  x_scale: float = 1.0
  mix_scale: float = 1.0
  dtype: str = "float32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `coefficients`."""
    rng = np.random.default_rng(seed)
    channels = self.streams * self.width
    mixes = (2 + self.streams) * self.streams
    x = self.x_scale * rng.normal(size=(self.tokens, self.streams, self.width))
    base = rng.normal(size=mixes)
    base[2 * self.streams :] += 4 * np.eye(self.streams).reshape(-1)
    return {
      "x_NxMxD": jnp.asarray(x, self.dtype),
      "fn_QxP": jnp.asarray(rng.normal(size=(mixes, channels)) * channels**-0.5, jnp.float32),
      "base_Q": jnp.asarray(base, jnp.float32),
      "scale_3": jnp.asarray(self.mix_scale * rng.uniform(0.5, 1.5, 3), jnp.float32),
      "iters": self.iters,
      "eps": 1e-6,
      "norm_eps": 1e-20,
    }


SPECS = (
  Spec("streams"),
  Spec("released_iterations", iters=20),
  Spec("odd_sizes", tokens=67, streams=5, width=10, iters=7),
  Spec("one_token", tokens=1),
  Spec("one_stream", streams=1),
  Spec("one_iteration", iters=1),
  Spec("nearly_hard_mix", iters=20, mix_scale=10.0),
  Spec("large_streams", x_scale=1e4),
  Spec("bfloat16", width=32, dtype="bfloat16"),
)
