"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels.formats import quantise


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call of `moe` and how its tokens are spread over the experts.

  Routing: "even" draws each token's experts uniformly; "skewed" prefers low experts and leaves some
  empty; "one" sends every token to the same experts; "gaps" is even, but tokens use fewer than A
  experts, some none.
  """

  name: str
  tokens: int = 50
  active: int = 2
  experts: int = 5
  width: int = 12
  inner: int = 20
  limit: float = 10.0
  routing: Literal["even", "skewed", "one", "gaps"] = "even"
  x_scale: float = 1.0
  dtype: str = "float32"
  packed: bool = False  # MXFP4 weights, as the released checkpoint has them (shapes only)

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `moe`."""
    rng = np.random.default_rng(seed)
    N, A, E, D, F = self.tokens, self.active, self.experts, self.width, self.inner
    preference = rng.random((N, E))
    if self.routing == "skewed":
      preference = rng.random((N, E)) * (np.arange(E) < max(A, E // 2)) / (1 + np.arange(E))
    if self.routing == "one":
      preference = np.broadcast_to(np.arange(E)[::-1], (N, E))
    ids = np.argsort(-preference, axis=1)[:, :A]
    if self.routing == "gaps":
      ids = np.where(np.arange(A) < rng.integers(0, A + 1, (N, 1)), ids, -1)

    def normal(*shape, scale=1.0):
      return jnp.asarray(scale * rng.normal(size=shape), self.dtype)

    return {
      "x_NxD": normal(N, D, scale=self.x_scale),
      "ids_NxA": jnp.asarray(ids, jnp.int32),
      "weights_NxA": jnp.asarray(rng.uniform(0.1, 1.5, (N, A)), jnp.float32),
      "w_gate": normal(E, D, F, scale=D**-0.5),
      "w_up": normal(E, D, F, scale=D**-0.5),
      "w_down": normal(E, F, D, scale=F**-0.5),
      "limit": self.limit,
    }

  @property
  def most_temporaries(self) -> float:
    """Bytes of temporary memory that a call may take: packed experts are decoded one by one."""
    matrices = 3 * self.experts * self.width * self.inner
    return matrices / 16 if self.packed else math.inf  # an eighth of them as they are packed

  def shapes(self) -> dict:
    """The same, with shapes in the place of arrays."""
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # noqa: E731
    N, A, E, D, F = self.tokens, self.active, self.experts, self.width, self.inner
    matrices = {"w_gate": (E, D, F), "w_up": (E, D, F), "w_down": (E, F, D)}
    weights = {name: struct(shape, self.dtype) for name, shape in matrices.items()}
    if self.packed:
      pack = lambda w: quantise(w.swapaxes(1, 2), "mxfp4")  # noqa: E731
      weights = {name: jax.eval_shape(pack, w) for name, w in weights.items()}
    return {
      "x_NxD": struct((N, D), self.dtype),
      "ids_NxA": struct((N, A), "int32"),
      "weights_NxA": struct((N, A), "float32"),
      **weights,
      "limit": self.limit,
    }


SPECS = (
  Spec("even"),
  Spec("one_token", tokens=1),
  Spec("odd_sizes", tokens=67, active=3, experts=7, width=10, inner=13),
  Spec("several_blocks", tokens=331, active=2, experts=3),
  Spec("empty_experts", tokens=40, active=1, experts=9, routing="skewed"),
  Spec("one_expert_gets_all", tokens=300, active=1, routing="one"),
  Spec("all_experts_active", tokens=9, active=4, experts=4),
  Spec("more_experts_than_rows", tokens=3, experts=40),
  Spec("fewer_than_a", tokens=61, active=3, routing="gaps"),
  Spec("clamped", limit=0.5, x_scale=3.0),
  Spec("no_clamp", limit=0.0, x_scale=3.0),
  Spec("bfloat16", tokens=45, width=32, inner=48, dtype="bfloat16"),
)

_released = functools.partial(
  Spec, active=6, experts=384, width=5120, inner=2304, dtype="bfloat16", packed=True
)

# Sizes of the released model, to compile.
RELEASED = (
  _released("released_prefill", tokens=1024),
  _released("released_decode", tokens=8),
  # As wide, with few experts and plain weights: small enough to run.
  _released("released_layer", tokens=4096, experts=16, packed=False),
)
