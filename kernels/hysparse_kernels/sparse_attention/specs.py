"""Argument specs shared by tests, benchmarks, tuning and compile checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hysparse_kernels.documents import packed_positions, visible_span
from hysparse_kernels.formats import Format, Stored
from hysparse_kernels.sparse_attention.view import View

_stored = jax.jit(Stored.of, static_argnums=1)  # op by op it takes seconds


@dataclasses.dataclass(frozen=True)
class Spec:
  """Sizes of one call; `before` rows of the window precede the call.

  Attributes:
    entries: of each sequence, selected anywhere; 0: those that its tokens give, selected among the
      visible ones.
    nothing_selected: every row is -1.
    queries_in: dtype of the queries.
  """

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
  entries: int = 0
  nothing_selected: bool = False
  queries_in: str = "float32"

  def arguments(self, seed: int = 0) -> dict:
    """The keyword arguments of `sparse_attention`."""
    rng = np.random.default_rng(seed)
    positions = packed_positions(
      rng, self.batch, self.before + self.queries, self.ratio, self.documents
    )
    rows = self._rows(rng, positions)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return self._arrays(normal, jnp.asarray(positions), jnp.asarray(rows)) | self._numbers()

  def shapes(self) -> dict:
    """What `arguments` returns, with arrays described instead of allocated."""

    def arrays():
      positions = jnp.zeros((self.batch, self.before + self.queries), jnp.int32)
      rows = jnp.zeros((self.batch, self.queries, self.top_k), jnp.int32)
      return self._arrays(lambda *shape: jnp.zeros(shape), positions, rows)

    return jax.eval_shape(arrays) | self._numbers()

  def _numbers(self) -> dict:
    return {"scale": self.channels**-0.5}

  @property
  def _entries(self) -> int:
    return self.entries or (self.before + self.queries) // self.ratio

  def _rows(self, rng: np.random.Generator, positions_BxP: np.ndarray) -> np.ndarray:
    lo, hi = visible_span(positions_BxP, self.ratio)
    rows = np.full((self.batch, self.queries, self.top_k), -1, np.int32)
    for b, s in np.ndindex(self.batch, self.queries if not self.nothing_selected else 0):
      low, high = lo[b, self.before + s], hi[b, self.before + s]
      if self.entries:
        low, high = 0, self.entries
      chosen = rng.choice(np.arange(low, high), min(self.top_k, high - low), replace=False)
      rows[b, s, : len(chosen)] = b * self._entries + np.sort(chosen)
    return rows

  def _arrays(
    self, normal: Callable[..., jax.Array], positions_BxP: jax.Array, rows_BxSxK: jax.Array
  ) -> dict:
    B, S, C = self.batch, self.queries, self.channels
    pool = _stored(normal(B * self._entries, C), self.main_kv) if self.top_k else None
    return {
      "q_BxSxHxC": normal(B, S, self.heads, C).astype(self.queries_in),
      "positions_BxS": positions_BxP[:, self.before :],
      "view": View(
        window=_stored(normal(B, self.before + S, C), self.window_kv),
        tags_BxP=positions_BxP,
        entries=pool,
        rows_BxSxK=rows_BxSxK if self.top_k else None,
        width=self.window,
      ),
      "sink_H": normal(self.heads),
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
  Spec("nothing_selected", queries=11, nothing_selected=True),
  Spec("many_heads", queries=16, heads=64, channels=32),
  Spec("packed", batch=2, queries=33, channels=40, ratio=2, main_kv="fp4", window_kv="fp8"),
  Spec("packed_one_token", batch=3, queries=1, before=40, main_kv="mxfp4", window_kv="fp4"),
  Spec("bfloat16", queries=21, main_kv="bf16", window_kv="fp8", queries_in="bfloat16"),
)

_released = functools.partial(
  Spec,
  heads=64,
  channels=512,
  window=128,
  top_k=512,
  before=127,
  main_kv="fp4",
  window_kv="fp8",
  queries_in="bfloat16",
)

# Sizes of the released model: for benchmarks, and compile checks over `shapes`.
RELEASED = (
  _released("released_prefill", queries=128, entries=65_536),
  _released("released_decode", batch=8, queries=1, entries=65_536),
  _released("released_window_only", queries=128, top_k=0),
  _released("released_training", queries=128, entries=65_536, main_kv="bf16", window_kv="bf16"),
  # The last rows begin behind 2^31 bytes of codes.
  _released("released_large_pool", queries=1, entries=2**23 + 1024),
)
