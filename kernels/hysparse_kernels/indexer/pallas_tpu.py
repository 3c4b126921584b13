"""TPU backend: a kernel that scores a chunk of keys, inside the running top-k of `running.py`.

The grid runs over sequences, blocks of keys and, innermost, blocks of queries. The first block of
queries decodes a block of keys into scratch memory, in the dtype of the queries, and all further
ones find it there. The dots, [queries * heads, keys], their relu, weights and sum over heads stay
in VMEM; what is written is [queries, keys].

Keys come packed from where the block table points: one input of the kernel for each page (or part
of one), its address known before the kernel starts, so that the pipeline fetches ahead. TPUs keep
arrays of rows narrower than their 128 lanes transposed, entries in lanes, and so does the kernel:
the pool is read in place, and nibbles and scales spread over sublanes. Lanes are fetched by the
128, so pages should hold a multiple of 128 entries; of smaller ones that divide 128 the tile around
each is fetched. Anything else (wide rows, other page sizes) is first copied for the chunk, packed.

Exact: decoding, and dots of bfloat16 queries up to the order of sums; float32 queries take the
product of several passes. `released_rounding` rounds as the reference does, but after sums in
another order, so that a score may differ by one bfloat16 step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import Stored, tiles
from hysparse_kernels.formats.bits import bits_of, float_of
from hysparse_kernels.indexer import running
from hysparse_kernels.indexer.pool import Pool
from hysparse_kernels.paged import Paged

_LANES = 128
_SUBLANES = 8  # of 32-bit values


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
  sizes = tuning.sizes("indexer", "pallas_tpu", queries=q_BxSxIxD.shape[1])
  score = functools.partial(
    score_chunk,
    released_rounding=released_rounding,
    size=sizes["keys"],
    queries=sizes["kernel_queries"],
  )
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
    score_chunk=score,
    sizes=sizes,
    step=sizes["keys"],
  )


def score_chunk(
  q_BxQxIxD: jax.Array,
  keys: Paged,
  weights_BxQxI: jax.Array,
  first: jax.Array | int,
  count: int,
  *,
  released_rounding: bool,
  size: int,
  queries: int,
) -> jax.Array:
  """Scores of a chunk, see `running.ScoreChunk`.

  Args:
    size: keys of a block, a multiple of the lanes, of which `first` is one.
    queries: of a block.
  """
  B, Q, own_heads, _ = q_BxQxIxD.shape
  size = min(size, blocks.count(count, _LANES) * _LANES)
  steps = blocks.count(count, size)
  if keys.table_BxJ is None:
    own_Bx1 = jnp.arange(B, dtype=jnp.int32)[:, None]  # sequences are pages
    keys = dataclasses.replace(keys, table_BxJ=own_Bx1)
  if not _in_place(keys):
    keys, first = _copied(keys, first, steps * size), 0
  cut = _Cut.of(keys.block, size)
  places_BxJ = _places(keys, cut, first, steps * cut.pieces)

  width = tiles.width(keys.rows)
  # Heads that fill up the sublanes weigh nothing; channels beyond those of the keys are zeros.
  heads = blocks.count(own_heads, _SUBLANES) * _SUBLANES
  q = _padded(_padded(q_BxQxIxD, 2, heads), 3, width).reshape(B, Q * heads, width)
  weights_BxQxI = _padded(weights_BxQxI.astype(jnp.float32), 2, heads)
  if compat.interpret():
    q = q.astype(jnp.float32)  # as in compat.einsum
  queries = min(Q, blocks.count(queries, _SUBLANES) * _SUBLANES)

  columns = jax.tree.map(jnp.transpose, keys.rows)
  piece_specs = []
  for p in range(cut.pieces):

    def at(b, j, i, places, p=p):
      return 0, jax.lax.div(places[b, j * cut.pieces + p], cut.in_a_tile)

    spec = lambda x, at=at: pl.BlockSpec((x.shape[0], cut.tile), at)  # noqa: E731
    piece_specs.append(jax.tree.map(spec, columns))
  scores = pl.pallas_call(
    functools.partial(_kernel, cut=cut, released_rounding=released_rounding),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, steps, blocks.count(Q, queries)),
      in_specs=[
        pl.BlockSpec((1, queries * heads, width), lambda b, j, i, _: (b, i, 0)),
        pl.BlockSpec((1, queries, heads), lambda b, j, i, _: (b, i, 0)),
        piece_specs,
      ],
      out_specs=pl.BlockSpec((1, queries, size), lambda b, j, i, _: (b, i, j)),
      scratch_shapes=[pltpu.VMEM((width, size), q.dtype)],
    ),
    out_shape=jax.ShapeDtypeStruct((B, Q, steps * size), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary")  # queries share decoded keys
    ),
    interpret=compat.interpret(),
    name="indexer_scores",
  )(places_BxJ, q, weights_BxQxI, [columns] * cut.pieces)
  return scores[..., :count]


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
  pads = [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
  return jnp.pad(x, pads)


# --- Where keys are ----------------------------------------------------------------------------


def _in_place(keys: Paged) -> bool:
  """Whether the pool is laid out, and its pages are, so that the kernel can read it."""
  narrow = all(part.shape[-1] < _LANES for part in keys.rows.parts.values())
  return narrow and (keys.block % _LANES == 0 or _LANES % keys.block == 0)


def _copied(keys: Paged, first: jax.Array | int, count: int) -> Paged:
  """The `count` entries from `first` on, packed, each sequence a page."""
  ids_N = jnp.minimum(first + jnp.arange(count), keys.entries - 1)
  chunk = Paged.contiguous(keys.read(ids_N))
  own_Bx1 = jnp.arange(keys.table_BxJ.shape[0], dtype=jnp.int32)[:, None]
  return dataclasses.replace(chunk, table_BxJ=own_Bx1)


@dataclasses.dataclass(frozen=True)
class _Cut:
  """A block of keys comes in pieces: parts of pages. Tiles are what is fetched for them.

  Attributes:
    page: entries of it.
    piece: entries; it divides pages and blocks of keys.
    pieces: of a block of keys.
  """

  page: int
  piece: int
  pieces: int

  @classmethod
  def of(cls, page: int, size: int) -> _Cut:
    piece = math.gcd(page, size)
    return cls(page, piece, size // piece)

  @property
  def in_a_tile(self) -> int:
    """Pieces that come with a fetched one, itself included."""
    return max(1, _LANES // self.piece)

  @property
  def tile(self) -> int:
    return self.piece * self.in_a_tile


def _places(keys: Paged, cut: _Cut, first: jax.Array | int, count: int) -> jax.Array:
  """Which pieces of the pool hold the `count` pieces of each sequence from entry `first` on.

  Beyond a sequence stands any other piece.
  """
  in_a_page = cut.page // cut.piece
  at_J = first // cut.piece + jnp.arange(count)
  last = keys.table_BxJ.shape[1] - 1
  page_BxJ = jnp.maximum(keys.table_BxJ[:, jnp.minimum(at_J // in_a_page, last)], 0)
  return (page_BxJ * in_a_page + at_J % in_a_page).astype(jnp.int32)


# --- The kernel --------------------------------------------------------------------------------


def _kernel(
  places_ref: jax.Ref,
  q_ref: jax.Ref,
  weights_ref: jax.Ref,
  pieces: Sequence[Stored],
  scores_ref: jax.Ref,
  keys_ref: jax.Ref,
  *,
  cut: _Cut,
  released_rounding: bool,
) -> None:
  """Scores of a block of queries at a block of keys, which the first of them decodes."""
  b, first = pl.program_id(0), pl.program_id(1) * cut.pieces

  @pl.when(pl.program_id(2) == 0)
  def _decode():
    places = [places_ref[b, first + p] for p in range(cut.pieces)]
    columns = jax.tree.map(lambda *refs: _side_by_side(refs, places, cut), *pieces)
    keys_ref[...] = tiles.decode_columns(columns).astype(keys_ref.dtype)

  _, queries, heads = weights_ref.shape
  wide = keys_ref.dtype == jnp.float32
  dots = jnp.dot(
    q_ref[0],
    keys_ref[...],
    precision=jax.lax.Precision.HIGHEST if wide else None,
    preferred_element_type=jnp.float32,
  )
  rounded = _to_bfloat16 if released_rounding else (lambda x: x)
  dots = rounded(dots)
  positive = jnp.where(dots <= 0, 0.0, dots)  # a relu through which NaN passes
  products = weights_ref[0][..., None] * positive.reshape(queries, heads, -1)
  scores_ref[0] = rounded(rounded(products).sum(1))


def _side_by_side(refs: Sequence[jax.Ref], places: Sequence[jax.Array], cut: _Cut) -> jax.Array:
  """One array [bytes, keys] of the pieces of a part, as values of 32 bits."""
  words = jnp.float32 if jnp.issubdtype(refs[0].dtype, jnp.floating) else jnp.int32
  fetched = [ref[...].astype(words) for ref in refs]
  if cut.in_a_tile == 1:
    return jnp.concatenate(fetched, axis=1)
  lane = jax.lax.broadcasted_iota(jnp.int32, fetched[0].shape, 1)
  joined = []
  for p, tile in enumerate(fetched):
    to = p % cut.in_a_tile * cut.piece
    of = jax.lax.rem(places[p], cut.in_a_tile) * cut.piece
    moved = pltpu.roll(tile, to - of + jnp.where(of > to, _LANES, 0), 1)
    if to:
      joined[-1] = jnp.where(lane < to, joined[-1], moved)
    else:
      joined.append(moved)
  return jnp.concatenate(joined, axis=1)


def _to_bfloat16(x: jax.Array) -> jax.Array:
  """float32 rounded to values of bfloat16, ties to even, as integers: a pair of casts may go."""
  bits = bits_of(x)
  return float_of((bits + 0x7FFF + (bits >> 16 & 1)) & jnp.uint32(0xFFFF0000))
