"""What a call of the model reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hysparse.cache.state import Cache, Pages
from hysparse.nn.image_span import IMAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """B rows of S tokens; without a cache a row holds one document or several packed ones.

  Documents start at row offsets that are multiples of `ModelConfig.alignment`. Padding behind a
  document counts as its tail (positions run on), so nothing real ever sees it.

  With a cache a row continues one sequence: its valid tokens come first (else the cache tells of an
  error) and the model sets positions, length and pages (`continuing`).

  Attributes:
    tokens_BxS: token ids.
    positions_BxS: position of each token inside its document; 0 starts a new one.
    valid_BxS: False on padding, which reaches no expert and counts in no loss or load.
    is_prompt_BxS: True for prompt tokens, which may use fewer experts than generated ones.
    token_types_BxS: -1 text, 0 image start, 1 image, 2 newline, 3 image end; None: all text.
    images_BxNxD: features of the image tokens of this call, of each row in reading order; rows with
      fewer are filled up. None without images.
    length_B: tokens of each sequence before the call; None without a cache.
    pages: where the sequences' entries are; None without a cache.
    gap: the tokens before the call may not have passed here: the window starts where its rows are
      missing (static).
  """

  tokens_BxS: Int[Array, "B S"]
  positions_BxS: Int[Array, "B S"]
  valid_BxS: Bool[Array, "B S"]
  is_prompt_BxS: Bool[Array, "B S"]
  token_types_BxS: Int[Array, "B S"] | None = None
  images_BxNxD: Float[Array, "B N D"] | None = None
  length_B: Int[Array, "B"] | None = None
  pages: Pages | None = None
  gap: bool = dataclasses.field(default=False, metadata={"static": True})

  @classmethod
  def of(
    cls,
    tokens_BxS: Int[Array, "B S"],
    counts_B: Int[Array, "B"] | None = None,
    *,
    is_prompt: bool = False,
  ) -> Batch:
    """One document per row.

    Args:
      tokens_BxS: token ids.
      counts_B: tokens of each row, the rest is padding; None: all of them.
      is_prompt: whether all are prompt tokens.

    Raises:
      ValueError: tokens that are not [B, S], counts that are not [B] or not in 0..S.
    """
    tokens_BxS = jnp.asarray(tokens_BxS)
    if tokens_BxS.ndim != 2:
      raise ValueError(f"tokens: have shape {tokens_BxS.shape}; must be [sequences, tokens]")
    B, S = tokens_BxS.shape
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    prompt = jnp.full((B, S), is_prompt)
    valid = jnp.ones((B, S), bool)
    if counts_B is not None:
      counts_B = _counts(counts_B, B, S)
      valid = jnp.arange(S) < counts_B[:, None]
    return cls(tokens_BxS, positions, valid, prompt)

  def continuing(self, cache: Cache) -> Batch:
    """The same tokens as the continuation of the sequences of a cache."""
    positions = cache.length_B[:, None] + jnp.arange(self.tokens_BxS.shape[1], dtype=jnp.int32)
    return dataclasses.replace(
      self, positions_BxS=positions, length_B=cache.length_B, pages=cache.pages
    )

  def last(self, count: int) -> Batch:
    """The last `count` valid tokens of each row of a continuing batch, in front."""
    parts = ("tokens_BxS", "positions_BxS", "valid_BxS", "is_prompt_BxS", "token_types_BxS")
    cut = {name: self.tail(getattr(self, name), count) for name in parts}
    cut["length_B"] = self.length_B + jnp.maximum(self.count_B - count, 0)
    return dataclasses.replace(self, **cut, images_BxNxD=None, gap=True)

  def tail(self, values: Any, count: int) -> Any:
    """Of arrays [B, S, ...], those of the last `count` valid tokens; fewer come first.

    Where there are at most `count` tokens, all: [B, min(S, count), ...].
    """
    if self.tokens_BxS.shape[1] <= count:
      return values
    at_BxN = jnp.maximum(self.count_B - count, 0)[:, None] + jnp.arange(count)
    return jax.tree.map(lambda x: x[jnp.arange(len(x))[:, None], at_BxN], values)

  @property
  def count_B(self) -> Int[Array, "B"]:
    """Valid tokens of each row."""
    return self.valid_BxS.sum(1, dtype=jnp.int32)

  def entries_B(self, ratio: int) -> Int[Array, "B"] | None:
    """Entries of each continued sequence after the call; None without a cache."""
    return None if self.length_B is None else (self.length_B + self.count_B) // ratio

  @property
  def unfit_B(self) -> Bool[Array, "B"]:
    """Rows that cannot continue a sequence: padding in front, or image tokens without features."""
    gap_B = (self.valid_BxS[:, 1:] & ~self.valid_BxS[:, :-1]).any(1)
    if self.token_types_BxS is None:
      return gap_B
    features = 0 if self.images_BxNxD is None else self.images_BxNxD.shape[1]
    return gap_B | ((self.token_types_BxS == IMAGE).sum(1) > features)

  @property
  def is_image_BxS(self) -> Bool[Array, "B S"]:
    """Image tokens and their delimiters."""
    if self.token_types_BxS is None:
      return jnp.zeros(self.tokens_BxS.shape, bool)
    return self.token_types_BxS >= 0

  def span(self, ratio: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Entries lo <= t < hi that each query may see: the complete groups of its own document."""
    visible = (self.positions_BxS + 1) // ratio
    if self.length_B is not None:
      return jnp.zeros_like(visible), visible
    row = jnp.arange(self.tokens_BxS.shape[1], dtype=jnp.int32)
    lo = (row - self.positions_BxS) // ratio
    return lo, lo + visible


def _counts(counts_B: Any, rows: int, most: int) -> Int[Array, "B"]:
  if np.shape(counts_B) != (rows,):
    raise ValueError(f"counts: have shape {np.shape(counts_B)}; must be [{rows}], one for each row")
  if not isinstance(counts_B, jax.core.Tracer):
    counts = np.asarray(counts_B)
    if counts.size and not 0 <= counts.min() <= counts.max() <= most:
      raise ValueError(f"counts: are {counts.tolist()}; must be in 0..{most}, the tokens of a row")
  return jnp.asarray(counts_B, jnp.int32)
