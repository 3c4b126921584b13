"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `before` tokens precede the call."""

  name: str
  batch: int = 1
  queries: int = 48
  heads: int = 4
  groups: int = 1
  channels: int = 16
  ratio: int = 1
  before: int = 0
  documents: int = 1

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `dense_attention`."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    length = self.before + self.queries
    positions = packed_positions(rng, self.batch, length, self.ratio, self.documents)
    lo, hi = visible_span(positions, self.ratio)
    shape = (self.batch, max(1, length // self.ratio), self.groups, self.channels)
    return {
      "q_BxSxHxC": normal(self.batch, self.queries, self.heads, self.channels),
      "k_BxTxGxC": normal(*shape),
      "v_BxTxGxC": normal(*shape),
      "lo_BxS": jnp.asarray(lo[:, self.before :]),
      "hi_BxS": jnp.asarray(hi[:, self.before :]),
      "scale": self.channels**-0.5,
    }


SPECS = (
  Spec("latent"),
  Spec("several_blocks", batch=2, queries=150, channels=8, before=200),
  Spec("documents_and_ratio", batch=2, queries=140, ratio=3, documents=4),
  Spec("grouped", queries=33, heads=6, groups=2),
  Spec("multi_head", queries=20, groups=4),
  Spec("one_token", batch=3, queries=1, before=70),
  Spec("nothing_visible_yet", queries=4, ratio=4),
)
