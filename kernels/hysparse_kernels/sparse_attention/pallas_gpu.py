"""GPU backend: a Pallas kernel, lowered through Triton.

A program has one query, or one part of its keys, and all heads (in blocks, if there are many): the
heads are the rows of its products, [heads, channels] x [keys, channels]. All heads share their
keys, so each packed row is fetched and decoded once for all of them. A loop over blocks of keys,
first those of the window and then the selected ones, gathers rows by their number, decodes them in
registers (`formats/halves.py`) and keeps a running softmax.

With few queries (decoding) the blocks of keys are dealt out to as many programs as fill the device;
each part is normalised alone and `parts.join` makes one of them. The sink belongs to the first.

Decoding and masks are exact. Products are summed in float32; those of float32 take three of TF32,
which leaves about its precision. In narrow dtypes probabilities are rounded relative to the largest
score so far, where the definition has the largest of all. The backward pass is the one of the xla
backend; the mass of the entries is computed apart (mass.py), and only where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import Stored, halves
from hysparse_kernels.sparse_attention import parts
from hysparse_kernels.sparse_attention.around import backend_of
from hysparse_kernels.sparse_attention.view import View, dtype_of

_SMALLEST = 16  # rows that a tensor core multiplies


def _run(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
  B, S, H, C = q_BxSxHxC.shape
  K = 0 if view.rows_BxSxK is None else view.rows_BxSxK.shape[-1]
  sizes = tuning.sizes("sparse_attention", "pallas_gpu", bytes=q_BxSxHxC.dtype.itemsize)
  heads = min(sizes["heads"], max(_SMALLEST, pl.next_power_of_2(H)))
  keys = _Blocks.of(view.width, K, B * S * blocks.count(H, heads), sizes)
  kernel = functools.partial(_kernel, keys=keys, heads=heads, scale=scale)
  dtype = q_BxSxHxC.dtype if keys.parts == 1 else jnp.float32
  out, lse = pl.pallas_call(
    kernel,
    grid=(S, blocks.count(H, heads), B, keys.parts),
    out_shape=(
      jax.ShapeDtypeStruct((keys.parts, B, S, H, C), dtype),
      jax.ShapeDtypeStruct((keys.parts, B, S, H), jnp.float32),
    ),
    compiler_params=plgpu.CompilerParams(num_warps=sizes["warps"], num_stages=sizes["stages"]),
    interpret=compat.interpret(),
    name="sparse_attention",
  )(q_BxSxHxC, positions_BxS, _in_words(view), sink_H.astype(jnp.float32))
  return parts.join(out, lse, q_BxSxHxC.dtype)


sparse_attention = backend_of(_run)


def _in_words(view: View) -> View:
  entries = None if view.entries is None else halves.in_words(view.entries)
  return View(
    halves.in_words(view.window), view.tags_BxP, entries, view.rows_BxSxK, width=view.width
  )


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """How the keys of a query are cut: `near` blocks of its window, then `far` ones of the selection.

  Attributes:
    size: keys of a block.
    each: blocks of a part, of which the last one may have fewer.
  """

  size: int
  near: int
  far: int
  each: int

  @classmethod
  def of(cls, window: int, selected: int, programs: int, sizes: Mapping[str, int]) -> _Blocks:
    """In as many parts as make sizes["programs"] of this many programs, if there are blocks."""
    near, far = (blocks.count(n, sizes["keys"]) for n in (window, selected))
    parts = max(1, sizes["programs"] // programs)
    return cls(sizes["keys"], near, far, blocks.count(near + far, parts))

  @property
  def parts(self) -> int:
    return blocks.count(self.near + self.far, self.each)


class _Running(NamedTuple):
  """The softmax over the keys so far; sums are relative to the largest score.

  Attributes:
    largest_H: -inf before the first key.
    total_H: sum of the probabilities.
    values: sum of probability times value, halves [H, P].
  """

  largest_H: jax.Array
  total_H: jax.Array
  values: tuple[jax.Array, jax.Array]


def _kernel(q_ref, positions_ref, view: View, sink_ref, out_ref, lse_ref, *, keys, heads, scale):
  s, head_block, b, part = (pl.program_id(axis) for axis in range(4))
  S, H, C = q_ref.shape[1:]
  W, before = view.width, view.window.shape[1] - S
  head_H = head_block * heads + jnp.arange(heads)
  real_H = head_H < H
  q = halves.load_pair(q_ref, (b, s, head_H), real_H)
  position = positions_ref[b, s]

  def near(i: jax.Array, running: _Running) -> _Running:
    row_N = i * keys.size + jnp.arange(keys.size)  # of the window, oldest first
    at_N, expected_N = (x - (W - 1) + row_N for x in (before + s, position))
    there_N = (row_N < W) & (at_N >= 0) & (expected_N >= 0)
    tags_N = plgpu.load(view.tags_BxP.at[b, at_N], mask=there_N, other=-1)
    there_N &= tags_N == expected_N
    return _attend_to(q, view.window, (b, at_N), there_N, running, scale)

  def far(i: jax.Array, running: _Running) -> _Running:
    k_N = (i - keys.near) * keys.size + jnp.arange(keys.size)
    there_N = (k_N < view.rows_BxSxK.shape[-1]) & (position >= 0)
    rows_N = plgpu.load(view.rows_BxSxK.at[b, s, k_N], mask=there_N, other=-1)
    return _attend_to(q, view.entries, (rows_N,), rows_N >= 0, running, scale)

  nothing = jnp.zeros((heads, halves.width(C)), jnp.float32)
  running = _Running(jnp.full((heads,), -jnp.inf), jnp.zeros((heads,)), (nothing, nothing))
  first, end = part * keys.each, (part + 1) * keys.each
  running = jax.lax.fori_loop(first, jnp.minimum(end, keys.near), near, running)
  if keys.far:
    first, end = jnp.maximum(first, keys.near), jnp.minimum(end, keys.near + keys.far)
    running = jax.lax.fori_loop(first, end, far, running)

  sink_H = plgpu.load(sink_ref.at[head_H], mask=real_H & (part == 0), other=-jnp.inf)
  top_H = _finite(jnp.maximum(running.largest_H, sink_H))
  fade_H = jnp.exp(running.largest_H - top_H)
  total_H = running.total_H * fade_H + jnp.exp(sink_H - top_H)
  plgpu.store(lse_ref.at[part, b, s, head_H], top_H + jnp.log(total_H), mask=real_H)
  share_H = fade_H / jnp.where(total_H == 0, 1.0, total_H)  # 0: a part without keys
  for half, values_HxP in enumerate(running.values):
    index, channels = halves.pair_index((part, b, s, head_H), C, half)
    out_HxP = (values_HxP * share_H[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[index], out_HxP, mask=channels & real_H[:, None])


def _attend_to(
  q: tuple[jax.Array, jax.Array],
  rows: Stored,
  at: tuple[jax.Array, ...],
  there_N: jax.Array,
  running: _Running,
  scale: float,
) -> _Running:
  """The softmax with another block of keys, rows `at` of these."""
  dtype = q[0].dtype
  keys = halves.load(rows, at, there_N, dtype)
  scores_HxN = sum(_dot("hp,np->hn", *both) for both in zip(q, keys, strict=True)) * scale
  scores_HxN = jnp.where(there_N[None], scores_HxN, -jnp.inf)
  largest_H = jnp.maximum(running.largest_H, scores_HxN.max(1))
  top_H = _finite(largest_H)
  p_HxN = jnp.exp(scores_HxN - top_H[:, None])
  fade_H = jnp.exp(running.largest_H - top_H)
  total_H = running.total_H * fade_H + p_HxN.sum(1)
  used_HxN = p_HxN.astype(dtype_of(rows, dtype)).astype(dtype)
  values = tuple(
    old * fade_H[:, None] + _dot("hn,np->hp", used_HxN, half)
    for old, half in zip(running.values, keys, strict=True)
  )
  return _Running(largest_H, total_H, values)


def _finite(x: jax.Array) -> jax.Array:
  """0 for -inf, to subtract from other -inf."""
  return jnp.where(x == -jnp.inf, 0.0, x)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """A product summed in float32."""
  precision = None
  if compat.interpret():
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  elif a.dtype == jnp.float32:
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
