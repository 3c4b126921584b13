"""GPU backend: Pallas kernels, lowered through Triton, for rows of a packed format.

A program has a few rows. Packing finds the largest magnitude of each block, makes scales and codes
in integers (integers.py; Triton divides approximately) and writes the bytes where an array of
places says: one behind the other, or, appending, into a pool that is updated in place. Rows without
a place are not read. Channels are in halves (`formats/halves.py`), as the nibbles of a byte are;
where blocks do not divide a half, each group of channels reads the whole block that it is part of.

All of it is exact. What has no codes ("bf16", "f32") is left to XLA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import QUANTISERS, Format, Stored, halves
from hysparse_kernels.fp4 import integers, reference
from hysparse_kernels.paged import NOWHERE, Paged


def pack(x: jax.Array, format: Format) -> Stored:
  if format not in QUANTISERS:
    return reference.pack(x, format)
  shape = jax.eval_shape(functools.partial(reference.pack, format=format), x)
  places_N = jnp.arange(x.size // x.shape[-1], dtype=jnp.int32)
  rows = _write(x.reshape(-1, x.shape[-1]), places_N, _flat(shape))
  return jax.tree.map(lambda part, like: part.reshape(like.shape), rows, shape)


def append(paged: Paged, ids_BxN: jax.Array, x: jax.Array, valid_BxN: jax.Array) -> Paged:
  if paged.rows.format not in QUANTISERS:
    return reference.append(paged, ids_BxN, x, valid_BxN)
  places_BxN = paged.locate(jnp.where(valid_BxN, ids_BxN, NOWHERE))
  rows = _write(x.reshape(-1, x.shape[-1]), places_BxN.reshape(-1), paged.rows)
  return dataclasses.replace(paged, rows=rows)


def unpack(rows: Stored, dtype: jnp.dtype) -> jax.Array:
  if rows.format not in QUANTISERS:
    return reference.unpack(rows, dtype)
  shape = rows.shape
  words = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), halves.in_words(rows))
  out = jax.ShapeDtypeStruct(words.shape, dtype)
  return _call(_unpack_kernel, len(words.parts["scales"]), out)(words).reshape(shape)


def _write(x_NxC: jax.Array, places_N: jax.Array, into: Stored) -> Stored:
  """Rows packed and written to their places; elsewhere, what `into` holds (shapes: anything)."""
  fresh = isinstance(into.parts["scales"], jax.ShapeDtypeStruct)
  in_words = jax.eval_shape if fresh else lambda f, *arguments: f(*arguments)
  words = in_words(halves.in_words, into)
  out = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), words)
  aliases = {} if fresh else {2: 0, 3: 1}  # codes and scales
  pool = () if fresh else (words,)
  rows = _call(_write_kernel, len(x_NxC), out, aliases)(x_NxC, places_N, *pool)
  return halves.from_words(rows)


def _flat(shape: Stored) -> Stored:
  """The shape of rows [N, C]."""
  return jax.tree.map(
    lambda part: jax.ShapeDtypeStruct((part.size // part.shape[-1], part.shape[-1]), part.dtype),
    shape,
  )


def _call(kernel, rows: int, out, aliases: dict[int, int] | None = None):
  sizes = tuning.sizes("fp4", "pallas_gpu", rows=rows)
  return pl.pallas_call(
    functools.partial(kernel, count=rows, size=sizes["rows"]),
    grid=(blocks.count(rows, sizes["rows"]),),
    out_shape=out,
    input_output_aliases=aliases or {},
    compiler_params=plgpu.CompilerParams(num_warps=sizes["warps"], num_stages=1),
    interpret=compat.interpret(),
  )


def _write_kernel(x_ref, places_ref, *refs: Stored, count: int, size: int):
  out = refs[-1]  # before it is the pool that it shares its memory with
  groups, block = halves.Groups.of(out), QUANTISERS[out.format].block
  n_N = pl.program_id(0) * size + jnp.arange(size)
  place_N = plgpu.load(places_ref.at[n_N], mask=n_N < count, other=NOWHERE)
  there_N = place_N >= 0
  # What is masked out points beyond the pool, and never to a row that another one is written to.
  at_N = jnp.where(there_N, place_N, out.shape[0])

  def load_bits(channels_1xGxW: jax.Array, mask: jax.Array) -> jax.Array:
    index = n_N[:, None, None], channels_1xGxW
    return integers.bits_of(
      plgpu.load(x_ref.at[index], mask=mask & there_N[:, None, None], other=0)
    )

  pair = []
  for half in (0, 1):
    first_1xGx1, real = groups.first_channels(half)
    whole_1xGxW = first_1xGx1 // block * block + jnp.arange(block)
    bits = load_bits(whole_1xGxW, real & (whole_1xGxW < groups.channels))
    largest_NxGx1 = integers.magnitude(bits).max(-1)[..., None]
    scales_NxGx1 = integers.scale_codes(largest_NxGx1, out.format)
    own_1xGxW = first_1xGx1 + jnp.arange(groups.size)
    mine = groups.real(half, own_1xGxW)
    if groups.size < block:
      bits = load_bits(own_1xGxW, mine)
    pair.append(jnp.where(mine, integers.codes(bits, scales_NxGx1, out.format), 0))
    begins = real & (first_1xGx1 % block == 0)
    index = jnp.where(begins, first_1xGx1 // block, out.parts["scales"].shape[-1])
    plgpu.store(
      out.parts["scales"].at[at_N[:, None, None], index],
      scales_NxGx1.astype(jnp.uint8),
      mask=begins & there_N[:, None, None],
    )
  if groups.packed:
    pair = [pair[0] | pair[1] << 4]
  for half, bytes_NxGxW in enumerate(pair):
    halves.store_bytes(out.parts["codes"], groups, (at_N,), there_N, half, bytes_NxGxW)


def _unpack_kernel(rows: Stored, out_ref, *, count: int, size: int):
  n_N = pl.program_id(0) * size + jnp.arange(size)
  pair = halves.load(rows, (n_N,), n_N < count, out_ref.dtype)
  for half, values_NxP in enumerate(pair):
    index, channels = halves.pair_index((n_N,), rows.channels, half)
    plgpu.store(out_ref.at[index], values_NxP, mask=channels & (n_N < count)[:, None])
