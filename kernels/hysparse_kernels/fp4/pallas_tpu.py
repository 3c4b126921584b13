"""TPU backend: Pallas kernels for rows of a packed format.

A step has a block of rows, channels in lanes. The largest magnitude of a block of channels reaches
all its lanes by exchanges with neighbours (1, 2, 4, ... lanes away); each lane then makes scale and
code in integers (integers.py: no lane divides). A product with zeros and ones, exact for numbers of
8 bits, gathers the scales into lanes of their own.

Appending changes the pool where it is; XLA's own scatter would lay out the whole pool anew, twice.
Memory is moved in tiles, so a step fetches the tiles that its rows are in, each once, puts the rows
in (again by a product) and sends the tiles back before the next step begins. Rows of at least a
register lie in sublanes, 32 to a tile of bytes, and so do their scales, as attention reads them.
TPUs keep narrower rows transposed, in lanes, 128 to a tile; the indexer's kernel reads them there,
and this one writes them there.

All of it is exact. What has no codes ("bf16", "f32") is left to XLA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import QUANTISERS, Format, Stored, tiles
from hysparse_kernels.fp4 import integers, reference
from hysparse_kernels.paged import NOWHERE, Paged

_LANES = 128
_ROWS = 32  # of a byte tile


def pack(x: jax.Array, format: Format) -> Stored:
  if format not in QUANTISERS:
    return reference.pack(x, format)
  shape = jax.eval_shape(functools.partial(reference.pack, format=format), x)
  size, x_NxP = _in_blocks(x)
  out = jax.tree.map(
    lambda part: jax.ShapeDtypeStruct((len(x_NxP), part.shape[-1]), part.dtype), shape
  )
  rows = pl.pallas_call(
    _pack_kernel,
    grid=(len(x_NxP) // size,),
    in_specs=[_block_of_rows(x_NxP, size)],
    out_specs=jax.tree.map(lambda part: _block_of_rows(part, size), out),
    out_shape=out,
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=compat.interpret(),
    name="fp4_pack",
  )(x_NxP)
  count = x.size // x.shape[-1]
  return jax.tree.map(lambda part, like: part[:count].reshape(like.shape), rows, shape)


def unpack(rows: Stored, dtype: jnp.dtype) -> jax.Array:
  if rows.format not in QUANTISERS:
    return reference.unpack(rows, dtype)
  flat = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), rows)
  count = flat.shape[0]
  size = _size(count)
  flat = jax.tree.map(lambda part: jnp.pad(part, ((0, -count % size), (0, 0))), flat)
  out = jax.ShapeDtypeStruct(flat.shape, dtype)
  values = pl.pallas_call(
    _unpack_kernel,
    grid=(len(flat.parts["codes"]) // size,),
    in_specs=[jax.tree.map(lambda part: _block_of_rows(part, size), flat)],
    out_specs=_block_of_rows(out, size),
    out_shape=out,
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=compat.interpret(),
    name="fp4_unpack",
  )(flat)
  return values[:count].reshape(rows.shape)


def append(paged: Paged, ids_BxN: jax.Array, x: jax.Array, valid_BxN: jax.Array) -> Paged:
  if paged.rows.format not in QUANTISERS:
    return reference.append(paged, ids_BxN, x, valid_BxN)
  layout = _Layout.of(paged.rows)
  size, x_NxP = _in_blocks(x)
  places_N = paged.locate(jnp.where(valid_BxN, ids_BxN, NOWHERE)).reshape(-1)
  places_N = jnp.pad(places_N, (0, len(x_NxP) - len(places_N)), constant_values=NOWHERE)
  pool = layout.laid_out(paged.rows)
  stays = jax.tree.map(lambda part: pl.BlockSpec(memory_space=pltpu.HBM), pool)
  written = pl.pallas_call(
    functools.partial(_append_kernel, layout=layout),
    grid=(len(x_NxP) // size,),
    in_specs=[
      pl.BlockSpec((1, 1, size), lambda j: (j, 0, 0), memory_space=pltpu.SMEM),
      _block_of_rows(places_N[:, None], size),
      _block_of_rows(x_NxP, size),
      stays,
    ],
    out_specs=stays,
    out_shape=jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), pool),
    input_output_aliases={3: 0, 4: 1},  # codes and scales
    scratch_shapes=[
      jax.tree.map(lambda part: pltpu.VMEM((size, *layout.tile(part)), part.dtype), pool),
      pltpu.SemaphoreType.DMA(()),
    ],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
    interpret=compat.interpret(),
    name="fp4_append",
  )(_tiles_to_move(places_N.reshape(-1, 1, size), layout.rows), places_N[:, None], x_NxP, pool)
  return dataclasses.replace(paged, rows=layout.back(written, paged.rows))


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How a pool lies in memory.

  Attributes:
    columns: transposed.
  """

  columns: bool

  @classmethod
  def of(cls, pool: Stored) -> _Layout:
    return cls(columns=pool.parts["codes"].shape[-1] < _LANES)

  @property
  def rows(self) -> int:
    """Of a tile."""
    return _LANES if self.columns else _ROWS

  def laid_out(self, pool: Stored) -> Stored:
    """The pool as it lies there, in whole tiles: nothing is copied, unless it has odd rows."""

    def part(x: jax.Array) -> jax.Array:
      missing = -len(x) % self.rows
      x = jnp.pad(x, ((0, missing), (0, 0))) if missing else x
      return x.T if self.columns else x

    return jax.tree.map(part, pool)

  def back(self, pool: Stored, like: Stored) -> Stored:
    """The inverse of `laid_out`."""
    return jax.tree.map(lambda x, old: (x.T if self.columns else x)[: len(old)], pool, like)

  def tile(self, part: jax.Array | jax.Ref) -> tuple[int, int]:
    """The shape of a tile of a part that is laid out."""
    return (part.shape[0], self.rows) if self.columns else (self.rows, part.shape[1])

  def at(self, part: jax.Ref, tile: jax.Array) -> jax.Ref:
    """A tile of a part that is laid out."""
    rows = pl.ds(pl.multiple_of(tile * self.rows, self.rows), self.rows)
    return part.at[:, rows] if self.columns else part.at[rows]

  def spread(self, bytes_NxL: jax.Array, mine_NxR: jax.Array) -> jax.Array:
    """A tile with bytes of rows where they belong, and -1 elsewhere; all int32."""
    both = (bytes_NxL + 1).astype(jnp.float32), mine_NxR.astype(jnp.float32)  # 256 is exact, too
    a, b = both if self.columns else both[::-1]
    dims = (((0,), (0,)), ((), ()))
    product = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    return product.astype(jnp.int32) - 1


def _tiles_to_move(places_Jx1xN: jax.Array, rows: int) -> jax.Array:
  """The tile of each row that is the first of its step in that tile; -1 for all others."""
  tile_Jx1xN = places_Jx1xN // rows
  same_JxNxN = tile_Jx1xN.swapaxes(1, 2) == tile_Jx1xN
  earlier_NxN = jnp.tri(same_JxNxN.shape[-1], k=-1, dtype=bool)
  first_JxN = ~(same_JxNxN & earlier_NxN).any(-1)
  return jnp.where((places_Jx1xN >= 0) & first_JxN[:, None], tile_Jx1xN, NOWHERE)


def _size(rows: int) -> int:
  """Rows of a block: for few of them, only as many as a tile has."""
  return min(tuning.sizes("fp4", "pallas_tpu", rows=rows)["rows"], rows + -rows % _ROWS)


def _in_blocks(x: jax.Array) -> tuple[int, jax.Array]:
  """(rows of a block, rows with zeros behind them up to whole blocks and whole registers)."""
  x_NxC = x.reshape(-1, x.shape[-1])
  size = _size(len(x_NxC))
  return size, jnp.pad(x_NxC, ((0, -len(x_NxC) % size), (0, -x.shape[-1] % _LANES)))


def _block_of_rows(x: jax.Array | jax.ShapeDtypeStruct, size: int) -> pl.BlockSpec:
  return pl.BlockSpec((size, x.shape[-1]), lambda j: (j, 0))


def _pack_kernel(x_ref, out: Stored):
  for name, part in _packed(x_ref[...], out).items():
    out.parts[name][...] = part.astype(jnp.uint8)


def _unpack_kernel(rows: Stored, out_ref):
  values = tiles.decode(jax.tree.map(lambda part: part[...], rows))
  out_ref[...] = values[:, : rows.channels].astype(out_ref.dtype)


def _append_kernel(
  tiles_ref, places_ref, x_ref, _, pool: Stored, buffers: Stored, moved, *, layout: _Layout
):
  pairs = {name: (pool.parts[name], buffers.parts[name]) for name in pool.parts}

  def each(act) -> None:
    """act(name, tile in the pool, tile in a buffer, its number) for all tiles of the step."""

    def one(n, _):
      tile = tiles_ref[0, 0, n]

      @pl.when(tile >= 0)
      def _():
        for name, (part, buffer) in pairs.items():
          act(name, layout.at(part, tile), buffer.at[n], tile)

    jax.lax.fori_loop(0, tiles_ref.shape[-1], one, None)

  def put_in(name, there, here, tile) -> None:
    row_NxR = jax.lax.broadcasted_iota(jnp.int32, (len(places_ref), layout.rows), 1)
    mine_NxR = places_ref[...] == tile * layout.rows + row_NxR
    new = layout.spread(packed[name], mine_NxR)
    old = here[...].astype(jnp.int32)
    here[...] = jnp.where(new >= 0, new, old).astype(here.dtype)
    pltpu.make_async_copy(here, there, moved).start()

  each(lambda name, there, here, tile: pltpu.make_async_copy(there, here, moved).start())
  packed = _packed(x_ref[...], pool)
  # All of them: a wait is for a number of bytes, whichever transfer brings them.
  each(lambda name, there, here, tile: pltpu.make_async_copy(there, here, moved).wait())
  each(put_in)
  each(lambda name, there, here, tile: pltpu.make_async_copy(here, there, moved).wait())


def _packed(x_NxP: jax.Array, like: Stored) -> dict[str, jax.Array]:
  """Bytes of rows, int32: [N, bytes] of codes and of scales."""
  format, C, block = like.format, like.channels, QUANTISERS[like.format].block
  lanes = x_NxP.shape[-1]
  bits = integers.bits_of(x_NxP)
  channel = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 1)
  bits = jnp.where(channel < C, bits, 0)
  largest, away = integers.magnitude(bits), 1
  while away < block:
    left, right = (pltpu.roll(largest, shift, 1) for shift in (away, lanes - away))
    largest = jnp.maximum(largest, jnp.where(channel & away != 0, left, right))
    away *= 2
  scales = integers.scale_codes(largest, format)
  codes = jnp.where(channel < C, integers.codes(bits, scales, format), 0)
  if tiles.codes_in_a_byte(format) == 2:
    half = blocks.count(C, 2)
    codes = codes | pltpu.roll(codes, lanes - half, 1) << 4
    codes = codes[:, :half]
  else:
    codes = codes[:, :C]
  count = blocks.count(C, block)
  lane = jax.lax.broadcasted_iota(jnp.int32, (lanes, count), 0)
  first = block * jax.lax.broadcasted_iota(jnp.int32, (lanes, count), 1)
  gathered = jnp.dot(
    scales.astype(jnp.float32),
    (lane == first).astype(jnp.float32),
    preferred_element_type=jnp.float32,
  )
  return {"codes": codes, "scales": gathered.astype(jnp.int32)}
