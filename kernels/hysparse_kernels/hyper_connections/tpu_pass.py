"""One pass over the streams on a TPU, of which each operation is a part.

The pass reads a block of tokens and channels of all streams; if asked to, it updates them, folds
them, and adds what they contribute to the mixes of their tokens. After the last channels of a block
of tokens the mixes become coefficients. `advance` is all of that: streams and the sublayer's output
are read once, the new streams written once, and what it takes to compute is hidden behind that.

Streams are the first axis, so that tokens and channels fill tiles whatever their number is; the
transposition outside is a choice of layout, no work, where kernels follow each other. A few tokens
at a time go through registers. In the mixes tokens are lanes, and Sinkhorn is elementwise work over
them, with one array for each row of the matrices.

The mixes are products of float32 quality at the price of few passes of bfloat16 ones: the weights
are sums of three bfloat16 numbers, side by side in one operand, and so is a stream that is not
bfloat16 itself. Everything else is float32 arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hysparse_kernels import blocks, compat, tuning
from hysparse_kernels.formats import round_to

_LANES = 128
_SUBLANES = 8
_ROWS = 16  # tokens at a time: sublanes of a bfloat16 tile
_PIECES = 3  # bfloat16 numbers that make up a float32 one


def mixing(
  x_NxMxD: jax.Array, fn_QxP: jax.Array, base_Q: jax.Array, scale_3: jax.Array
) -> dict[str, jax.Array]:
  """The parameters of the coefficients, as the pass takes them."""
  _, M, D = x_NxMxD.shape
  fn_MxQxD = jnp.moveaxis(fn_QxP.reshape(-1, M, D), 1, 0)
  scale_Q = scale_3[np.repeat([0, 1, 2], [M, M, M * M])]
  return {
    "fn": jnp.concatenate(_pieces(fn_MxQxD), axis=1).astype(_narrow()),
    "affine": jnp.stack([scale_Q, base_Q], axis=1),
  }


def _pieces(x: jax.Array) -> list[jax.Array]:
  """float32 numbers as sums of bfloat16 values."""
  pieces = []
  for _ in range(_PIECES):
    pieces.append(round_to(x, jnp.bfloat16))
    x = x - pieces[-1]
  return pieces


def _narrow() -> jnp.dtype:
  """Of the operands of products: bfloat16, which XLA cannot multiply everywhere on CPU."""
  return jnp.float32 if compat.interpret() else jnp.bfloat16


def one_pass(
  x_NxMxD: jax.Array,
  inputs: Mapping[str, jax.Array],
  wanted: tuple[str, ...],
  numbers: tuple[int, float, float] | None = None,
) -> tuple:
  """The wanted results, in order.

  Args:
    inputs: for an update: "y", and post and comb as "weights"; for a fold: pre as the first of the
      "weights"; for coefficients: `mixing`.
    wanted: of "x" (updated), "u" (of the updated streams, if they are) and "coefficients" (too).
    numbers: iters, eps and norm_eps.
  """
  given = len(x_NxMxD)
  if given < _SUBLANES:
    by_token = {"y", "weights"} & set(inputs)
    inputs = {**inputs, **{name: _filled(inputs[name]) for name in by_token}}
    x_NxMxD = _filled(x_NxMxD)
  N, M, D = x_NxMxD.shape
  Q = (2 + M) * M
  sizes = tuning.sizes("hyper_connections", "pallas_tpu", tokens=N, width=D)
  tokens = min(N, blocks.count(sizes["tokens"], _LANES) * _LANES)
  width = math.gcd(D, sizes["width"])
  width = width if width % _LANES == 0 else D
  inputs = {"x": jnp.moveaxis(x_NxMxD, 1, 0), **inputs}

  streams = pl.BlockSpec((M, tokens, width), lambda n, d: (0, n, d))
  one = pl.BlockSpec((tokens, width), lambda n, d: (n, d))
  read = {
    "x": lambda _: streams,
    "y": lambda _: one,
    "weights": lambda w: pl.BlockSpec((tokens, w.shape[1]), lambda n, d: (n, 0)),
    "fn": lambda fn: pl.BlockSpec((M, fn.shape[1], width), lambda n, d: (0, 0, d)),
    "affine": lambda a: pl.BlockSpec(a.shape, lambda n, d: (0, 0)),
  }
  written = {
    "x": (streams, (M, N, D), x_NxMxD.dtype),
    "u": (one, (N, D), x_NxMxD.dtype),
    "coefficients": (pl.BlockSpec((Q, tokens), lambda n, d: (0, n)), (Q, N), jnp.float32),
  }
  scratch = [
    pltpu.VMEM((_PIECES * Q, tokens), jnp.float32),
    pltpu.VMEM((tokens, _LANES if width % _LANES == 0 else width), jnp.float32),
  ]
  results = pl.pallas_call(
    functools.partial(_kernel, numbers=numbers, channels=M * D),
    grid=(blocks.count(N, tokens), D // width),
    in_specs=[{name: read[name](array) for name, array in inputs.items()}],
    out_specs={name: written[name][0] for name in wanted},
    out_shape={name: jax.ShapeDtypeStruct(*written[name][1:]) for name in wanted},
    scratch_shapes=scratch if numbers else [],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=compat.interpret(),
    name="streams_" + "_".join(wanted),
  )(inputs)
  finished = {
    "x": lambda x_MxNxD: jnp.moveaxis(x_MxNxD, 0, 1),
    "u": lambda u_NxD: u_NxD,
    "coefficients": lambda c: (c[:M].T, c[M : 2 * M].T, c[2 * M :].T.reshape(N, M, M)),
  }
  all_tokens = tuple(finished[name](results[name]) for name in wanted)
  return jax.tree.map(lambda result: result[:given], all_tokens)


def _filled(x: jax.Array) -> jax.Array:
  """With zeros up to the fewest tokens that products are made of."""
  return jnp.pad(x, [(0, _SUBLANES - len(x))] + [(0, 0)] * (x.ndim - 1))


# --- The kernel --------------------------------------------------------------------------------


def _kernel(
  ins: Mapping[str, jax.Ref],
  outs: Mapping[str, jax.Ref],
  *sums: jax.Ref,
  numbers: tuple[int, float, float] | None,
  channels: int,
) -> None:
  """What is wanted of a block of tokens and channels, and coefficients behind the last channels.

  Args:
    sums: over channels, of products and squares; see `_finish`.
  """
  streams = outs.get("x", ins["x"])
  M, tokens, _ = streams.shape
  rows = _ROWS if tokens % _ROWS == 0 else tokens

  if numbers:

    @pl.when(pl.program_id(1) == 0)
    def _begin():
      for ref in sums:
        ref[...] = jnp.zeros_like(ref)

  def some_tokens(i, _):
    at = pl.ds(pl.multiple_of(i * rows, rows), rows)
    if "x" in outs:
      _update(ins, outs["x"], at, first=M if "u" in outs else 0)
    if "u" in outs:
      weights = ins["weights"][at]
      u = sum(weights[:, m : m + 1] * _wide(streams, m, at) for m in range(M))
      outs["u"][at] = u.astype(outs["u"].dtype)
    if numbers:
      squares = sum(_wide(streams, m, at) ** 2 for m in range(M))
      lanes = sums[1].shape[1]
      sums[1][at] += sum(squares[:, k : k + lanes] for k in range(0, squares.shape[1], lanes))

  jax.lax.fori_loop(0, tokens // rows, some_tokens, None)

  if numbers:
    sums[0][...] += sum(_products(ins["fn"][m], streams[m]) for m in range(M))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _end():
      _finish(*sums, ins["affine"], outs["coefficients"], M, channels, *numbers)


def _wide(ref: jax.Ref, m: int, at: pl.Slice) -> jax.Array:
  return ref[m, at].astype(jnp.float32)


def _update(ins: Mapping[str, jax.Ref], x_ref: jax.Ref, at: pl.Slice, first: int) -> None:
  """The updated streams of a few tokens; post begins at column `first` of the weights."""
  weights, y = ins["weights"][at], ins["y"][at].astype(jnp.float32)
  streams = range(x_ref.shape[0])
  column = lambda k: weights[:, first + k : first + k + 1]  # noqa: E731
  x = [_wide(ins["x"], i, at) for i in streams]
  for j in streams:
    comb = [column((1 + i) * len(streams) + j) for i in streams]
    updated = sum(comb[i] * x[i] for i in streams) + column(j) * y
    x_ref[j, at] = updated.astype(x_ref.dtype)


def _products(fn: jax.Array, x: jax.Array) -> jax.Array:
  """[pieces * Q, tokens] of one stream."""
  rest, pieces = x, []
  for _ in range(1 if x.dtype == jnp.bfloat16 else _PIECES):
    pieces.append(rest.astype(jnp.bfloat16).astype(fn.dtype))
    rest = rest - pieces[-1].astype(rest.dtype)
  across = (((1,), (1,)), ((), ()))
  dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
  return sum(dot(fn, piece, across) for piece in pieces)


def _finish(
  products_ref: jax.Ref,
  squares_ref: jax.Ref,
  affine_ref: jax.Ref,
  out_ref: jax.Ref,
  M: int,
  channels: int,
  iters: int,
  eps: float,
  norm_eps: float,
) -> None:
  """Coefficients [Q, tokens] from sums over all channels.

  Args:
    products_ref: [pieces * Q, tokens].
    squares_ref: [tokens, lanes], to be summed over lanes: by a product, which also turns them.
  """
  Q = out_ref.shape[0]
  ones = jnp.ones((8, squares_ref.shape[1]), jnp.float32)
  squares = jax.lax.dot_general(
    ones, squares_ref[...], (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
  )[:1]
  mixes = sum(products_ref[p * Q : (p + 1) * Q] for p in reversed(range(_PIECES)))
  mixes *= jax.lax.rsqrt(squares / channels + norm_eps)
  affine = affine_ref[...]
  out_ref[...] = mixes * affine[:, :1] + affine[:, 1:]
  out_ref[:M] = jax.nn.sigmoid(out_ref[:M]) + eps
  out_ref[M : 2 * M] = 2 * jax.nn.sigmoid(out_ref[M : 2 * M])
  rows = [slice((2 + i) * M, (3 + i) * M) for i in range(M)]
  for row, comb in zip(rows, _sinkhorn([out_ref[row] for row in rows], iters, eps), strict=True):
    out_ref[row] = comb


def _sinkhorn(logits: list[jax.Array], iters: int, eps: float) -> list[jax.Array]:
  """As `xla.sinkhorn`, of a list of rows [M, tokens]."""

  def columns(comb):
    total = sum(comb) + eps
    return [row / total for row in comb]

  def both(_, comb):
    return columns([row / (row.sum(0, keepdims=True) + eps) for row in comb])

  soft = [jnp.exp(row - row.max(0, keepdims=True)) for row in logits]
  soft = [row / row.sum(0, keepdims=True) + eps for row in soft]
  return jax.lax.fori_loop(0, iters - 1, both, columns(soft))
