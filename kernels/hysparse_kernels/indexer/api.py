"""The operations as callers see them."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from hysparse_kernels import dispatch, triton_launch
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import pallas_tpu, reference, xla
from hysparse_kernels.indexer.pool import Pool
from hysparse_kernels.paged import Paged

SELECT = {
  "reference": reference.select,
  "xla": xla.select,
  "pallas_tpu": pallas_tpu.select,
  "triton": triton_launch.lazy("indexer", "select"),
}
SCORE = {"reference": reference.score_rows, "xla": xla.score_rows}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
  """Entries chosen for each query, ascending, -1 for none, and the pool if one was asked for."""

  rows_BxSxK: Int[Array, "B S K"]
  pool: Pool | None = None


def select(
  q_BxSxIxD: Float[Array, "B S I D"],
  keys: Paged,
  weights_BxSxI: Float[Array, "B S I"],
  lo_BxS: Int[Array, "B S"],
  hi_BxS: Int[Array, "B S"],
  *,
  top_k: int,
  within: Pool | None = None,
  pool_blocks: int = 0,
  block_size: int = 8,
  released_rounding: bool = False,
  backend: str = "auto",
) -> Selection:
  """The `top_k` entries lo <= t < hi with the best score sum_i weight_i * relu(q_i . k_t).

  Equal scores go to the lower entry (the relu gives many exact zeros); queries that see fewer than
  K entries end in -1; a NaN score never selects. K = min(top_k, T). No gradient.

  Args:
    keys: [T, D] of each sequence, packed or plain; decoded in blocks, to the dtype of the queries.
    weights_BxSxI: head weights, scale included; may be negative.
    within: select only inside this pool.
    pool_blocks: publish a pool of at most this many blocks (0: none); the selection itself is not
      restricted by it.
    block_size: entries in a block of the published pool.
    released_rounding: round scores to bfloat16 where the released code does (scores.py).

  Source: arXiv 2609.19969, section 2.3.
  """
  run = dispatch.select("indexer", backend, SELECT)
  inputs = jax.lax.stop_gradient((q_BxSxIxD, keys, weights_BxSxI))
  options = (top_k, within, pool_blocks, block_size, released_rounding)
  return Selection(*run(*inputs, lo_BxS, hi_BxS, *options))


def score_rows(
  q_BxSxIxD: Float[Array, "B S I D"],
  keys: Stored,
  weights_BxSxI: Float[Array, "B S I"],
  rows_BxSxK: Int[Array, "B S K"],
  *,
  backend: str = "auto",
) -> Float[Array, "B S K"]:
  """Scores of given rows of `keys` [R, D], float32; what stands at -1 rows has no meaning.

  Differentiable in the queries, plain keys and the weights.
  """
  run = dispatch.select("score_rows", backend, SCORE)
  return run(q_BxSxIxD, keys, weights_BxSxI, rows_BxSxK)
