"""Where an image stands in a sequence: which tokens its span has and what they are embedded as.

A span is START, then for each row of the merged grid its IMAGE tokens and a NEWLINE, then END. All
of them carry the image token id; attention over them is causal as over text.

Source: vision part of the released code of DeepSeek-V4.1-Flash (arXiv 2609.19969).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from hysparse.config import ModelConfig
from hysparse.nn import init

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3  # token types

Grid = tuple[int, int]  # rows and columns


def merged_grid(grid: Grid, merge: int) -> Grid:
  """Rows and columns of IMAGE tokens of an image of `grid` patches; begun squares count whole."""
  n_h, n_w = grid
  return -(-n_h // merge), -(-n_w // merge)


def span_types(merged: Grid) -> Int[np.ndarray, " span"]:
  """Token types of the span of one image of `merged` IMAGE tokens, int8."""
  rows, columns = merged
  return np.array([START, *([IMAGE] * columns + [NEWLINE]) * rows, END], np.int8)


class Delimiters(nnx.Module):
  """The learned embeddings of START, NEWLINE and END."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    def vector() -> nnx.Param:
      return nnx.Param(init.table(rngs.params(), (config.d_model,), init.EMBEDDING_STD))

    self.start, self.newline, self.end = vector(), vector(), vector()

  def insert(
    self,
    text_BxSxD: Float[Array, "B S D"],
    token_types_BxS: Int[Array, "B S"],
    images_BxNxD: Float[Array, "B N D"],
  ) -> Float[Array, "B S D"]:
    """Embeddings of text with those of image spans in their places, in the dtype of the text.

    Args:
      text_BxSxD: embeddings of the token ids.
      token_types_BxS: see the constants of this file.
      images_BxNxD: the k-th IMAGE token of row b takes images[b, k]; where there is none, NaN, so
        that a missing image is not mistaken for a black one.
    """
    dtype = text_BxSxD.dtype
    B, N, D = images_BxNxD.shape
    missing_Bx1xD = jnp.full((B, 1, D), jnp.nan, dtype)
    rows_BxNxD = jnp.concatenate([images_BxNxD.astype(dtype), missing_Bx1xD], axis=1)
    is_image_BxS = token_types_BxS == IMAGE
    which_BxS = jnp.minimum(jnp.cumsum(is_image_BxS, axis=1, dtype=jnp.int32) - 1, N)
    image_BxSxD = jnp.take_along_axis(rows_BxNxD, which_BxS[..., None], axis=1)
    out = jnp.where(is_image_BxS[..., None], image_BxSxD, text_BxSxD)
    for kind, vector in ((START, self.start), (NEWLINE, self.newline), (END, self.end)):
      out = jnp.where((token_types_BxS == kind)[..., None], vector[...].astype(dtype), out)
    return out
