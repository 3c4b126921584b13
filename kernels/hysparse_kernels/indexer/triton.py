"""Triton backend, through jax-triton: a kernel that scores a chunk, inside `running.py`'s top-k.

A program decodes one block of keys from its packed bytes, found through the block table, and keeps
it while a block of queries passes by. For each query the product is [keys, heads]: keys are its
rows, so that one query fills the matrix units as well as many do, and the sum over the heads stays
within a row. Dots exist for one query at a time; what is written is [queries, keys].

Decoding is exact; float32 is multiplied as float32, bfloat16 is summed in float32.
`released_rounding` rounds as the reference does, but after sums in another order, so that a score
may differ by one bfloat16 step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from hysparse_kernels import blocks, compat, triton_launch, tuning
from hysparse_kernels.formats.triton import as_operand, load_halves, pair, round_to_bfloat16
from hysparse_kernels.indexer import running
from hysparse_kernels.indexer.pool import Pool
from hysparse_kernels.paged import Paged

_MIN_TILE = 16  # rows and columns of a matrix product


def select(
  q_BxSxIxD: jax.Array,
  keys: Paged,
  weights_BxSxI: jax.Array,
  lo_BxS: jax.Array,
  hi_BxS: jax.Array,
  top_k: int,
  within: Pool | None,
  pool_blocks: int,
  block_size: int,
  released_rounding: bool,
) -> tuple[jax.Array, Pool | None]:
  sizes = tuning.sizes("indexer", "triton", queries=q_BxSxIxD.shape[1])
  return running.select(
    q_BxSxIxD,
    keys,
    weights_BxSxI,
    lo_BxS,
    hi_BxS,
    top_k,
    within,
    pool_blocks,
    block_size,
    score_chunk=functools.partial(_score, released_rounding=released_rounding, sizes=sizes),
    sizes=sizes,
  )


def _score(q, keys, weights, first, count, *, released_rounding, sizes) -> jax.Array:
  launch = launch_of(q, keys, weights, first, count, released_rounding, sizes)
  return triton_launch.run(launch)[0]


def launch_of(
  q_BxQxIxD: jax.Array,
  keys: Paged,
  weights_BxQxI: jax.Array,
  first: jax.Array | int,
  count: int,
  released_rounding: bool,
  sizes: Mapping[str, int],
) -> triton_launch.Launch:
  """The launch that scores a chunk (`running.ScoreChunk`).

  Args:
    sizes: "keys" and "kernel_queries" of a program, its "warps" and "stages".
  """
  B, Q, heads, channels = q_BxQxIxD.shape
  queries = min(sizes["kernel_queries"], Q)
  first = jnp.asarray(first, jnp.int32).reshape(1)
  table = keys.table_BxJ
  return triton_launch.Launch(
    kernel=_kernel,
    arrays=(
      q_BxQxIxD, weights_BxQxI, first, first if table is None else table, *pair(keys.rows)
    ),
    results=(jax.ShapeDtypeStruct((B, Q, count), jnp.float32),),
    grid=(blocks.count(count, sizes["keys"]), blocks.count(Q, queries), B),
    constants={
      "QUERIES": Q,
      "HEADS": heads,
      "CHANNELS": channels,
      "COUNT": count,
      "ENTRIES": keys.entries,
      "PAGES": 0 if table is None else table.shape[1],
      "PAGE": keys.block,
      "FORMAT": keys.rows.format,
      "RELEASED": released_rounding,
      "WIDE": q_BxQxIxD.dtype != jnp.bfloat16 or compat.interpret(),
      "NARROW": q_BxQxIxD.dtype == jnp.bfloat16,
      "QUERY_BLOCK": queries,
      "KEY_BLOCK": sizes["keys"],
      "HEAD_BLOCK": max(_MIN_TILE, triton.next_power_of_2(heads)),
      "WIDTH": max(_MIN_TILE, triton.next_power_of_2(blocks.count(channels, 2))),
    },
    warps=sizes["warps"],
    stages=sizes["stages"],
  )  # fmt: skip


@triton.jit
def _kernel(
  q_ptr,  # [B, Q, I, D]
  weights_ptr,  # [B, Q, I]
  first_ptr,  # [1]
  table_ptr,  # [B, J]
  keys_ptr,  # [R, bytes]
  scales_ptr,
  scores_ptr,  # [B, Q, N]
  QUERIES: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  COUNT: tl.constexpr,
  ENTRIES: tl.constexpr,
  PAGES: tl.constexpr,
  PAGE: tl.constexpr,
  FORMAT: tl.constexpr,
  RELEASED: tl.constexpr,
  WIDE: tl.constexpr,
  NARROW: tl.constexpr,
  QUERY_BLOCK: tl.constexpr,
  KEY_BLOCK: tl.constexpr,
  HEAD_BLOCK: tl.constexpr,
  WIDTH: tl.constexpr,
):
  place = tl.program_id(0) * KEY_BLOCK + tl.arange(0, KEY_BLOCK)  # in the chunk
  sequence = tl.program_id(2).to(tl.int64)  # pools, queries and scores may exceed 2^31 elements
  entry = tl.load(first_ptr) + place
  there = (place < COUNT) & (entry < ENTRIES)
  if PAGES:
    page = tl.load(table_ptr + sequence * PAGES + entry // PAGE, mask=there, other=-1)
    there = there & (page >= 0)
    row = page.to(tl.int64) * PAGE + entry % PAGE
  else:
    row = sequence * ENTRIES + entry
  keys_low, keys_high = load_halves(keys_ptr, scales_ptr, row, there, FORMAT, CHANNELS, WIDTH)
  keys_low, keys_high = as_operand(keys_low, WIDE, NARROW), as_operand(keys_high, WIDE, NARROW)

  HALF: tl.constexpr = (CHANNELS + 1) // 2
  head = tl.arange(0, HEAD_BLOCK)
  channel = tl.arange(0, WIDTH)
  low = (head < HEADS)[:, None] & (channel < HALF)[None, :]
  high = low & (channel < CHANNELS - HALF)[None, :]
  begin = tl.program_id(1) * QUERY_BLOCK
  for at in range(begin, tl.minimum(begin + QUERY_BLOCK, QUERIES)):
    query = sequence * QUERIES + at
    places = (query * HEADS + head)[:, None] * CHANNELS + channel[None, :]
    q_low = as_operand(tl.load(q_ptr + places, mask=low, other=0), WIDE, False)
    q_high = as_operand(tl.load(q_ptr + places + HALF, mask=high, other=0), WIDE, False)
    weights = tl.load(weights_ptr + query * HEADS + head, mask=head < HEADS, other=0)
    dots = tl.dot(keys_low, tl.trans(q_low), input_precision="ieee")
    dots = tl.dot(keys_high, tl.trans(q_high), dots, input_precision="ieee")
    if RELEASED:
      dots = round_to_bfloat16(dots)
    products = tl.where(dots <= 0, 0.0, dots) * weights.to(tl.float32)[None, :]  # keeps NaN
    if RELEASED:
      products = round_to_bfloat16(products)
    scores = tl.sum(products, axis=1)
    if RELEASED:
      scores = round_to_bfloat16(scores)
    tl.store(scores_ptr + query * COUNT + place, scores, mask=place < COUNT)
