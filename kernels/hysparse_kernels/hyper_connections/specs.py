"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
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
    """The keyword arguments of `advance`; those of the other functions are among them.

    Its pre, post and comb are any numbers, no doubly stochastic matrix.
    """
    rng = np.random.default_rng(seed)
    M, mixes = self.streams, (2 + self.streams) * self.streams
    base = rng.normal(size=mixes)
    base[2 * M :] += 4 * np.eye(M).reshape(-1)
    scale = self.mix_scale * rng.uniform(0.5, 1.5, 3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return self._arrays(normal, jnp.asarray(base, jnp.float32), jnp.asarray(scale, jnp.float32))

  def shapes(self) -> dict:
    """What `arguments` returns, with arrays described instead of allocated."""
    mixes = (2 + self.streams) * self.streams
    numbers = {}

    def arrays():
      made = self._arrays(lambda *shape: jnp.zeros(shape), jnp.zeros(mixes), jnp.zeros(3))
      numbers.update({name: x for name, x in made.items() if not isinstance(x, jax.Array)})
      return {name: x for name, x in made.items() if isinstance(x, jax.Array)}

    return jax.eval_shape(arrays) | numbers

  def _arrays(
    self, normal: Callable[..., jax.Array], base_Q: jax.Array, scale_3: jax.Array
  ) -> dict:
    N, M, D = self.tokens, self.streams, self.width
    return {
      "x_NxMxD": (self.x_scale * normal(N, M, D)).astype(self.dtype),
      "y_NxD": normal(N, D).astype(self.dtype),
      "post_NxM": normal(N, M),
      "comb_NxMxM": normal(N, M, M),
      "pre_NxM": normal(N, M),
      "fn_QxP": normal(len(base_Q), M * D) * (M * D) ** -0.5,
      "base_Q": base_Q,
      "scale_3": scale_3,
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
  Spec("several_blocks", tokens=300, width=384),
  Spec("bfloat16", width=32, dtype="bfloat16"),
)

# Sizes of the released model: for benchmarks, and compile checks over `shapes`.
RELEASED = (
  Spec("released_prefill", tokens=4096, width=5120, iters=20, dtype="bfloat16"),
  Spec("released_decode", tokens=8, width=5120, iters=20, dtype="bfloat16"),
  Spec("released_float32", tokens=512, width=5120, iters=20),
)
