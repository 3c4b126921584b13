"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.sparse_attention.view import View


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `before` rows of the window precede the call."""

  name: str
  batch: int = 1
  queries: int = 32
  heads: int = 2
  channels: int = 16
  window: int = 8
  ratio: int = 1
  top_k: int = 6  # 0: a window-only layer
  before: int = 0
  documents: int = 1
  main_kv: Format = "f32"
  window_kv: Format = "f32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `sparse_attention`."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    positions = packed_positions(
      rng, self.batch, self.before + self.queries, self.ratio, self.documents
    )
    lo, hi = visible_span(positions, self.ratio)
    entries = (self.before + self.queries) // self.ratio
    rows = pool = None
    if self.top_k:
      pool = Stored.of(normal(self.batch * entries, self.channels), self.main_kv)
      rows = np.full((self.batch, self.queries, self.top_k), -1, np.int32)
      for b, s in np.ndindex(self.batch, self.queries):
        low, high = lo[b, self.before + s], hi[b, self.before + s]
        chosen = rng.choice(np.arange(low, high), min(self.top_k, high - low), replace=False)
        rows[b, s, : len(chosen)] = b * entries + np.sort(chosen)
    return {
      "q_BxSxHxC": normal(self.batch, self.queries, self.heads, self.channels),
      "positions_BxS": jnp.asarray(positions[:, self.before :]),
      "view": View(
        window=Stored.of(
          normal(self.batch, self.before + self.queries, self.channels), self.window_kv
        ),
        tags_BxP=jnp.asarray(positions),
        entries=pool,
        rows_BxSxK=None if rows is None else jnp.asarray(rows),
        width=self.window,
      ),
      "sink_H": normal(self.heads),
      "scale": self.channels**-0.5,
    }


SPECS = (
  Spec("prefill"),
  Spec("odd_sizes", batch=2, queries=67, heads=3, channels=10, window=5, ratio=2, top_k=7),
  Spec("documents", batch=2, queries=96, window=16, ratio=3, documents=4),
  Spec("window_only", queries=40, top_k=0),
  Spec("one_token", batch=3, queries=1, before=21, window=16),
  Spec("chunk", batch=2, queries=13, before=30, window=16, ratio=2, documents=2),
  Spec("window_longer_than_prompt", queries=5, window=16),
  Spec("k_above_entries", queries=9, ratio=4, top_k=20),
  Spec("many_heads", queries=16, heads=64, channels=32),
  Spec("packed", batch=2, queries=33, channels=40, ratio=2, main_kv="fp4", window_kv="fp8"),
  Spec("packed_one_token", batch=3, queries=1, before=40, main_kv="mxfp4", window_kv="fp4"),
)
