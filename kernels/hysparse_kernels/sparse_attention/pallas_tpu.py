"""TPU backend: packed rows go to the chip's memory as they are, and are decoded there.

The grid runs over groups of queries that are neighbours in a sequence and, inside, over steps of a
few queries. A group shares a slab of window rows, which its first step decodes into scratch memory
and all others find there: scores and values of the window are products over all queries of a step.
The selected rows of each query come by transfers of single rows (`tpu_rows.py`), into one of two
slots: while a query is computed, the rows of the next one are on their way, also when that one
belongs to the next step, or to another sequence. So decoding, a step of one query for each
sequence, overlaps transfers as prefill does. The grid runs in order on one core for that reason.

All keys of a query are in VMEM at once, [window + K, channels], and so are its scores: nothing is
merged, and probabilities are exactly those of the reference before they are rounded. Memory outside
the kernel grows with the slabs, [S + groups x window] packed rows.

Exact: decoding. Products of bfloat16 have float32 sums; float32 takes the product of several
passes. The backward pass is that of the xla backend.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import Stored, tiles
from hysparse_kernels.sparse_attention import tpu_rows
from hysparse_kernels.sparse_attention.around import backend_of
from hysparse_kernels.sparse_attention.softmax import offsets
from hysparse_kernels.sparse_attention.view import View, dtype_of

_HEADS = 16  # the sublanes of a bfloat16 tile; queries have whole ones
_ROWS = 32  # of a byte tile


def _call(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  B, S, H, C = q_BxSxHxC.shape
  sizes = tuning.sizes("sparse_attention", "pallas_tpu", queries=S)
  Q = min(sizes["queries"], S)
  group = min(blocks.count(sizes["group"], Q), blocks.count(S, Q)) * Q
  groups, steps = blocks.count(S, group), group // Q
  heads = _round_up(H, _HEADS)

  def by_step(x: jax.Array, fill: int = 0) -> jax.Array:
    """[B, S, ...] to [B * groups * steps, Q, ...]."""
    pads = [(0, 0), (0, groups * group - S)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=fill).reshape(-1, Q, *x.shape[2:])

  def step(g, j):
    return g * steps + j

  q = by_step(jnp.pad(q_BxSxHxC, [(0, 0), (0, 0), (0, heads - H), (0, 0)]))
  positions = by_step(positions_BxS, fill=-1)[:, None]
  sink_Hx1 = jnp.pad(sink_H.astype(jnp.float32), (0, heads - H))[:, None]
  slabs, tags = _slabs(view, S, group, groups)
  slab = tags.shape[-1]

  in_smem = functools.partial(pl.BlockSpec, memory_space=pltpu.SMEM)
  of_group = lambda x: pl.BlockSpec((1, *x.shape[1:]), lambda g, j: (g, 0, 0))  # noqa: E731
  arguments = [positions, q, sink_Hx1, tags, slabs]
  in_specs = [
    in_smem((1, 1, Q), lambda g, j: (step(g, j), 0, 0)),
    pl.BlockSpec((1, Q, heads, C), lambda g, j: (step(g, j), 0, 0, 0)),
    pl.BlockSpec((heads, 1), lambda g, j: (0, 0)),
    of_group(tags),
    jax.tree.map(of_group, slabs),
  ]
  window_dtype = dtype_of(view.window, q.dtype)
  scratch = [
    pltpu.VMEM((slab, C), window_dtype),
    pltpu.VMEM((Q, heads, slab), jnp.float32),
    pltpu.VMEM((Q, heads, slab), window_dtype),
    pltpu.VMEM((Q, heads, 1), jnp.float32),
  ]
  options = {"scale": scale, "width": view.width, "chunk": 0}
  if view.rows_BxSxK is not None:
    options["chunk"] = chunk = min(sizes["rows"], _round_up(view.rows_BxSxK.shape[-1], _ROWS))
    K = _round_up(view.rows_BxSxK.shape[-1], chunk)
    pool = tpu_rows.whole_words(view.entries)
    empty = K - view.rows_BxSxK.shape[-1]
    rows = jnp.pad(view.rows_BxSxK, [(0, 0), (0, 0), (0, empty)], constant_values=-1)
    rows = by_step(rows, fill=-1)
    words = tpu_rows.words_of(pool, rows)
    words = jnp.concatenate([words, jnp.roll(words[:, :1], -1, 0)], axis=1)  # the next step's first
    arguments += [words[:, :, None], rows[:, :, None], jax.tree.map(_stays, pool)]
    in_specs += [
      in_smem((1, Q + 1, 1, K), lambda g, j: (step(g, j), 0, 0, 0)),
      pl.BlockSpec((1, Q, 1, K), lambda g, j: (step(g, j), 0, 0, 0)),
      jax.tree.map(lambda part: pl.BlockSpec(memory_space=pltpu.HBM), pool),
    ]
    scratch += [
      pltpu.VMEM((Q, heads, C), jnp.float32),
      pltpu.VMEM((K, C), dtype_of(view.entries, q.dtype)),
      tpu_rows.buffers(pool, 2, K),
      pltpu.SemaphoreType.DMA((2,)),
    ]
  out, lse = pl.pallas_call(
    functools.partial(_kernel, **options),
    grid=(B * groups, steps),
    in_specs=in_specs,
    out_specs=(
      pl.BlockSpec((1, Q, heads, C), lambda g, j: (step(g, j), 0, 0, 0)),
      pl.BlockSpec((1, Q, heads), lambda g, j: (step(g, j), 0, 0)),
    ),
    out_shape=(
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
    ),
    scratch_shapes=scratch,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary", "arbitrary"),
      vmem_limit_bytes=sizes["vmem_mib"] << 20,
      disable_bounds_checks=True,  # of transfers: rows are clipped, and checks take half the time
    ),
    interpret=compat.interpret(),
    name="sparse_attention",
  )(*arguments)
  whole = lambda x: x.reshape(B, groups * group, *x.shape[2:])[:, :S, :H]  # noqa: E731
  return whole(out), whole(lse)


sparse_attention = backend_of(_call)


def _round_up(n: int, multiple: int) -> int:
  return blocks.count(n, multiple) * multiple


def _stays(part: jax.Array) -> jax.Array:
  """A part that XLA does not bring to VMEM as a whole before the kernel runs."""
  if compat.interpret() or not isinstance(part, jax.core.Tracer):
    return part
  return pltpu.with_memory_space_constraint(part, pltpu.HBM)


def _slabs(view: View, length: int, group: int, groups: int) -> tuple[Stored, jax.Array]:
  """Window rows [B * groups, L, C] and tags: W - 1 rows in front of a group, its own, a rest."""
  front = view.width - 1
  size = _round_up(front + group, _ROWS)
  before = view.window.shape[1] - length
  at = before - front + group * jnp.arange(groups)[:, None] + jnp.arange(size)
  there = (at >= 0) & (at < view.window.shape[1])
  at = jnp.clip(at, 0, view.window.shape[1] - 1)
  cut = lambda part: part[:, at].reshape(-1, size, part.shape[-1])  # noqa: E731
  tags = jnp.where(there, view.tags_BxP[:, at], -1)
  return jax.tree.map(cut, view.window), tags.reshape(-1, 1, size)


def _kernel(
  positions_ref, q_ref, sink_ref, tags_ref, slab_parts, *refs, scale, width, chunk
) -> None:
  """A step: its queries against the group's slab, and each against its own rows."""
  g, j = pl.program_id(0), pl.program_id(1)
  Q, heads, C = q_ref.shape[1:]
  if chunk:
    words_ref, rows_ref, pool, *refs = refs
  out_ref, lse_ref, slab_ref, near_ref, p_near_ref, share_ref, *refs = refs
  if chunk:
    far_ref, keys_ref, buffers, arrived = refs
    fetcher = tpu_rows.Fetcher(pool, buffers, arrived)
    first = (g * pl.num_programs(1) + j) * Q  # query of the call that the step begins with
    queries = pl.num_programs(0) * pl.num_programs(1) * Q

    @pl.when(first == 0)
    def _first_rows():
      fetcher.start(lambda k: words_ref[0, 0, 0, k], 0)

  tags_1xL = tags_ref[0]
  L = tags_1xL.shape[-1]

  @pl.when(j == 0)
  def _decode_slab():
    rows = jax.tree.map(lambda ref: ref[0], slab_parts)
    slab_ref[...] = _decoded(rows, _column(tags_1xL) >= 0, slab_ref.dtype, C)

  q = q_ref[0].reshape(Q * heads, C)
  near_ref[...] = (_dot(q, slab_ref[...], transposed=True) * scale).reshape(near_ref.shape)

  def query(i, _):
    position = positions_ref[0, 0, i]
    back_1xL = j * Q + i + width - 1 - jax.lax.broadcasted_iota(jnp.int32, (1, L), 1)
    expected_1xL = position - back_1xL
    visible_1xL = (back_1xL >= 0) & (back_1xL < width)
    visible_1xL &= (expected_1xL >= 0) & (tags_1xL == expected_1xL)
    near = jnp.where(visible_1xL, near_ref[i], -jnp.inf)
    largest = near.max(-1, keepdims=True)
    if chunk:
      slot = (first + i) & 1

      @pl.when(first + i + 1 < queries)
      def _next_rows():
        fetcher.start(lambda k: words_ref[0, i + 1, 0, k], 1 - slot)

      fetcher.wait(slot)
      for at in range(0, keys_ref.shape[0], chunk):
        places_Nx1 = _column(tpu_rows.places_of(rows_ref[0, i, :, at : at + chunk]))
        rows = fetcher.tile(slot, at, places_Nx1)
        keys_ref[at : at + chunk] = _decoded(rows, places_Nx1 >= 0, keys_ref.dtype, C)
      far = _dot(q_ref[0, i], keys_ref[...], transposed=True) * scale
      far = jnp.where((rows_ref[0, i] >= 0) & (position >= 0), far, -jnp.inf)
      largest = jnp.maximum(largest, far.max(-1, keepdims=True))
    sink_Hx1 = sink_ref[...]
    top = offsets(largest, sink_Hx1)
    p_near = jnp.exp(near - top.keys)
    p_near_ref[i] = p_near.astype(p_near_ref.dtype)
    total = p_near.sum(-1, keepdims=True)
    if chunk:
      p_far = jnp.exp(far - top.keys)
      total += p_far.sum(-1, keepdims=True)
      far_ref[i] = _dot(p_far.astype(keys_ref.dtype), keys_ref[...])
    total = total * top.fade + jnp.exp(sink_Hx1 - top.all)
    share_ref[i] = top.fade / total
    lse_ref[0, pl.ds(i, 1)] = _row(top.all + jnp.log(total))
    return _

  jax.lax.fori_loop(0, Q, query, None)
  p_near = p_near_ref[...].reshape(Q * heads, L)
  values = _dot(p_near, slab_ref[...]).reshape(Q, heads, C)
  if chunk:
    values += far_ref[...]
  out_ref[0] = (values * share_ref[...]).astype(out_ref.dtype)


def _decoded(rows: Stored, there_Nx1: jax.Array, dtype: jnp.dtype, channels: int) -> jax.Array:
  """A tile as `view.read` gives it."""
  return jnp.where(there_Nx1, tiles.decode(rows)[:, :channels], 0).astype(dtype)


def _dot(x: jax.Array, y: jax.Array, *, transposed: bool = False) -> jax.Array:
  """x @ y, or x @ y.T, with float32 sums."""
  x, y = compat.widened(x, y)
  if x.dtype != y.dtype:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  return jax.lax.dot_general(
    x,
    y,
    (((1,), (1 if transposed else 0,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )


def _diagonal(n: int) -> jax.Array:
  row, column = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
  return row == column


def _column(x_1xN: jax.Array) -> jax.Array:
  """[1, N] to [N, 1], of integers below 2^24: by a reduction that vector units have, for any N."""
  x_1xN = x_1xN.astype(jnp.float32)
  column = jnp.where(_diagonal(x_1xN.shape[1]), x_1xN, 0).sum(1, keepdims=True)
  return column.astype(jnp.int32)


def _row(x_Nx1: jax.Array) -> jax.Array:
  """[N, 1] to [1, N]."""
  return jnp.where(_diagonal(x_Nx1.shape[0]), x_Nx1, 0).sum(0, keepdims=True)
