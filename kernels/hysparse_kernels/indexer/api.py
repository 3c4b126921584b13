"""The operations as callers see them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import arguments, dispatch, triton_launch
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

  Raises:
    ValueError: arrays whose shapes or dtypes do not fit each other, a number out of its range.
    TypeError: keys or a pool that are none.
    BackendError: a backend that is not there or cannot run here.

  Source: arXiv 2609.19969, section 2.3.
  """
  run = dispatch.select("indexer", backend, SELECT)
  if not isinstance(keys, Paged):
    raise TypeError(f"keys: is a {type(keys).__name__}; must be Paged")
  keys, within = jax.tree.map(jnp.asarray, (keys, within))
  arrays = {"q_BxSxIxD": q_BxSxIxD, "weights_BxSxI": weights_BxSxI, "keys_RxD": keys.rows}
  spans = {"lo_BxS": lo_BxS, "hi_BxS": hi_BxS}
  if within is not None:
    if not isinstance(within, Pool):
      raise TypeError(f"within: is a {type(within).__name__}; must be a Pool")
    spans["within_BxSxN"] = within.blocks_BxSxN
    arguments.whole("within.block_size", within.block_size)
  keys.check(arguments.sizes(**arrays, **spans)["B"])
  arguments.floats(q_BxSxIxD=q_BxSxIxD, weights_BxSxI=weights_BxSxI)
  arguments.integers(**spans)
  top_k = arguments.whole("top_k", top_k)
  pool_blocks = arguments.whole("pool_blocks", pool_blocks, 0)
  block_size = arguments.whole("block_size", block_size)
  inputs = jax.lax.stop_gradient((q_BxSxIxD, keys, weights_BxSxI))
  options = (top_k, within, pool_blocks, block_size, released_rounding)
  lo_BxS, hi_BxS = lo_BxS.astype(jnp.int32), hi_BxS.astype(jnp.int32)
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

  Raises:
    ValueError: arrays whose shapes or dtypes do not fit each other.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("score_rows", backend, SCORE)
  keys = jax.tree.map(jnp.asarray, keys)
  arguments.sizes(
    q_BxSxIxD=q_BxSxIxD, keys_RxD=keys, weights_BxSxI=weights_BxSxI, rows_BxSxK=rows_BxSxK
  )
  arguments.floats(q_BxSxIxD=q_BxSxIxD, weights_BxSxI=weights_BxSxI)
  arguments.integers(rows_BxSxK=rows_BxSxK)
  rows_BxSxK = rows_BxSxK.astype(jnp.int32)
  return run(q_BxSxIxD, keys, weights_BxSxI, rows_BxSxK)
