"""Triton backend, through jax-triton: one program for each query and up to 64 of its heads.

All heads share the keys, so they are the rows of the matrix products, and the keys of a query pass
by in blocks: first its window, then the selected entries, gathered by row and decoded in registers
from their packed bytes (`formats/triton.py`). The softmax is an online one. Queries share no
entries, so a program takes one query; what neighbours share of the window, they find in the cache.

With few queries (decoding), the keys are dealt out to further programs. Each part is normalised
alone, the sink belongs to the first, and `parts.join` makes one of them.

Decoding and masks are exact; float32 is multiplied as float32, bfloat16 is summed in float32. Where
keys are bfloat16, probabilities are rounded relative to the largest score so far, and not of all
keys. The backward pass is the one of the xla backend; the mass of the entries is computed apart
(`mass.py`), and only where it is used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from hysparse_kernels import blocks, compat, triton_launch, tuning
from hysparse_kernels.formats.triton import as_operand, load_halves, pair
from hysparse_kernels.sparse_attention import parts
from hysparse_kernels.sparse_attention.around import backend_of
from hysparse_kernels.sparse_attention.view import View, dtype_of

_MIN_TILE = 16  # rows and columns of a matrix product

_PRECISION = tl.constexpr("ieee")  # of float32 products


def _run(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  out, lse = triton_launch.run(launch_of(q_BxSxHxC, positions_BxS, view, sink_H, scale))
  return parts.join(out, lse, q_BxSxHxC.dtype)


sparse_attention = backend_of(_run)


def launch_of(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> triton_launch.Launch:
  """The launch for a call; its results are (out, lse) of each part of the keys."""
  B, S, H, C = q_BxSxHxC.shape
  selected = 0 if view.rows_BxSxK is None else view.rows_BxSxK.shape[-1]
  wide = q_BxSxHxC.dtype != jnp.bfloat16 or compat.interpret()
  sizes = tuning.sizes("sparse_attention", "triton", bytes=4 if wide else 2, queries=B * S)
  heads = min(sizes["heads"], max(_MIN_TILE, triton.next_power_of_2(H)))
  entries, rows = (view.entries, view.rows_BxSxK) if selected else (view.window, view.tags_BxP)
  programs = B * S * blocks.count(H, heads)
  # More parts than blocks of keys would have nothing to do.
  count = max(blocks.count(n, sizes["keys"]) for n in (view.width, selected))
  count = max(1, min(count, sizes["programs"] // programs))
  return triton_launch.Launch(
    kernel=_kernel,
    arrays=(
      q_BxSxHxC, positions_BxS, view.tags_BxP, *pair(view.window), rows, *pair(entries), sink_H,
    ),
    results=(
      jax.ShapeDtypeStruct((count, B, S, H, C), q_BxSxHxC.dtype if count == 1 else jnp.float32),
      jax.ShapeDtypeStruct((count, B, S, H), jnp.float32),
    ),
    grid=(B * S, blocks.count(H, heads), count),
    constants={
      "QUERIES": S,
      "HEADS": H,
      "CHANNELS": C,
      "WINDOW_ROWS": view.tags_BxP.shape[1],
      "WINDOW": view.width,
      "SELECTED": selected,
      "SCALE": scale,
      "WINDOW_FORMAT": view.window.format,
      "ENTRY_FORMAT": entries.format,
      "WINDOW_NARROW": dtype_of(view.window, q_BxSxHxC.dtype) == jnp.bfloat16,
      "ENTRIES_NARROW": dtype_of(entries, q_BxSxHxC.dtype) == jnp.bfloat16,
      "WIDE": wide,
      "PARTS": count,
      "HEAD_BLOCK": heads,
      "KEY_BLOCK": sizes["keys"],
      "WIDTH": max(_MIN_TILE, triton.next_power_of_2(blocks.count(C, 2))),
    },
    warps=sizes["warps"],
    stages=sizes["stages"],
  )  # fmt: skip


@triton.jit
def _kernel(
  q_ptr,  # [B, S, H, C]
  positions_ptr,  # [B, S]
  tags_ptr,  # [B, P]
  window_ptr,  # [B, P, bytes]
  window_scales_ptr,
  rows_ptr,  # [B, S, K]
  entries_ptr,  # [R, bytes]
  entries_scales_ptr,
  sink_ptr,  # [H]
  out_ptr,  # [PARTS, B, S, H, C]
  lse_ptr,  # [PARTS, B, S, H]
  QUERIES: tl.constexpr,
  HEADS: tl.constexpr,
  CHANNELS: tl.constexpr,
  WINDOW_ROWS: tl.constexpr,
  WINDOW: tl.constexpr,
  SELECTED: tl.constexpr,
  SCALE: tl.constexpr,
  WINDOW_FORMAT: tl.constexpr,
  ENTRY_FORMAT: tl.constexpr,
  WINDOW_NARROW: tl.constexpr,
  ENTRIES_NARROW: tl.constexpr,
  WIDE: tl.constexpr,
  PARTS: tl.constexpr,
  HEAD_BLOCK: tl.constexpr,
  KEY_BLOCK: tl.constexpr,
  WIDTH: tl.constexpr,
):
  # Pools, queries and results may all be beyond 2^31 elements.
  query = tl.program_id(0).to(tl.int64)
  part = tl.program_id(2)
  sequence, at = query // QUERIES, query % QUERIES
  position = tl.load(positions_ptr + query)

  HALF: tl.constexpr = (CHANNELS + 1) // 2
  head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
  channel = tl.arange(0, WIDTH)
  low = (head < HEADS)[:, None] & (channel < HALF)[None, :]
  high = low & (channel < CHANNELS - HALF)[None, :]
  places = (query * HEADS + head)[:, None] * CHANNELS + channel[None, :]
  q_low = as_operand(tl.load(q_ptr + places, mask=low, other=0), WIDE, False)
  q_high = as_operand(tl.load(q_ptr + places + HALF, mask=high, other=0), WIDE, False)

  largest = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
  total = tl.zeros([HEAD_BLOCK], tl.float32)
  out_low = tl.zeros([HEAD_BLOCK, WIDTH], tl.float32)
  out_high = tl.zeros([HEAD_BLOCK, WIDTH], tl.float32)
  step = tl.arange(0, KEY_BLOCK)

  NEAR: tl.constexpr = (WINDOW + KEY_BLOCK - 1) // KEY_BLOCK
  NEAR_EACH: tl.constexpr = (NEAR + PARTS - 1) // PARTS
  for block in range(part * NEAR_EACH, tl.minimum(part * NEAR_EACH + NEAR_EACH, NEAR)):
    back = block * KEY_BLOCK + step  # from the query's own row
    row = WINDOW_ROWS - QUERIES + at - back
    there = (back < WINDOW) & (row >= 0) & (back <= position)
    row += sequence * WINDOW_ROWS
    tags = tl.load(tags_ptr + row, mask=there, other=-1)
    there = there & (tags == position - back)
    keys_low, keys_high = load_halves(
      window_ptr, window_scales_ptr, row, there, WINDOW_FORMAT, CHANNELS, WIDTH
    )
    largest, total, out_low, out_high = _absorb(
      largest, total, out_low, out_high, q_low, q_high, keys_low, keys_high, there,
      SCALE, WIDE, WINDOW_NARROW,
    )  # fmt: skip

  FAR: tl.constexpr = (SELECTED + KEY_BLOCK - 1) // KEY_BLOCK
  FAR_EACH: tl.constexpr = (FAR + PARTS - 1) // PARTS
  for block in range(part * FAR_EACH, tl.minimum(part * FAR_EACH + FAR_EACH, FAR)):
    place = block * KEY_BLOCK + step
    row = tl.load(rows_ptr + query * SELECTED + place, mask=place < SELECTED, other=-1)
    there = tl.minimum(row, position) >= 0
    keys_low, keys_high = load_halves(
      entries_ptr, entries_scales_ptr, row.to(tl.int64), there, ENTRY_FORMAT, CHANNELS, WIDTH
    )
    largest, total, out_low, out_high = _absorb(
      largest, total, out_low, out_high, q_low, q_high, keys_low, keys_high, there,
      SCALE, WIDE, ENTRIES_NARROW,
    )  # fmt: skip

  # The sink joins in only now: it may exceed every score by any amount.
  sink = tl.load(sink_ptr + head, mask=head < HEADS, other=0).to(tl.float32)
  sink = tl.where(part == 0, sink, float("-inf"))
  top = tl.maximum(largest, sink)
  base = tl.where(top == float("-inf"), 0.0, top)
  fade = tl.exp(largest - base)
  total = total * fade + tl.exp(sink - base)
  share = tl.where(total == 0, 0.0, fade / total)  # no key and no sink
  lse = top + tl.log(total)
  results = part * (tl.num_programs(0).to(tl.int64) * HEADS)  # of the parts before
  tl.store(lse_ptr + results + query * HEADS + head, lse, mask=head < HEADS)
  dtype = out_ptr.dtype.element_ty
  places += results * CHANNELS
  tl.store(out_ptr + places, (out_low * share[:, None]).to(dtype), mask=low)
  tl.store(out_ptr + places + HALF, (out_high * share[:, None]).to(dtype), mask=high)


@triton.jit
def _absorb(
  largest,
  total,
  out_low,
  out_high,
  q_low,
  q_high,
  keys_low,
  keys_high,
  there,
  SCALE: tl.constexpr,
  WIDE: tl.constexpr,
  NARROW: tl.constexpr,
):
  """The state of the online softmax after one more block of keys, which are also the values."""
  keys_low, keys_high = as_operand(keys_low, WIDE, NARROW), as_operand(keys_high, WIDE, NARROW)
  scores = tl.dot(q_low, tl.trans(keys_low), input_precision=_PRECISION)
  scores = tl.dot(q_high, tl.trans(keys_high), scores, input_precision=_PRECISION)
  scores = tl.where(there[None, :], scores * SCALE, float("-inf"))
  new = tl.maximum(largest, tl.max(scores, axis=1))
  base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
  p = tl.exp(scores - base[:, None])
  fade = tl.exp(largest - base)
  total = total * fade + tl.sum(p, axis=1)
  p = as_operand(p, WIDE, NARROW)
  out_low = tl.dot(p, keys_low, out_low * fade[:, None], input_precision=_PRECISION)
  out_high = tl.dot(p, keys_high, out_high * fade[:, None], input_precision=_PRECISION)
  return new, total, out_low, out_high
