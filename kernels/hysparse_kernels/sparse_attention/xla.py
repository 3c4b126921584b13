"""Portable backend: a loop over query blocks, forward and backward.

A block holds its window as one slab shared by all its queries (one matrix product) and gathers the
selected entries of each query. Memory grows with block x (W + K), never with S x T. The backward
pass recomputes a block's probabilities from the saved log-denominator and adds the gradients of
gathered rows into one accumulator carried through the loop.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hysparse_kernels import blocks, tuning
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import round_to
from hysparse_kernels.sparse_attention import one_query
from hysparse_kernels.sparse_attention.softmax import Offsets, offsets
from hysparse_kernels.sparse_attention.view import Attended, View, read


def sparse_attention(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> Attended:
  return Attended(*_attend(scale, q_BxSxHxC, positions_BxS, view, sink_H))


def block_size(q_BxSxHxC: jax.Array, view: View) -> int:
  """Queries of a block: so many that what they gather is bounded."""
  batch, length, _, channels = q_BxSxHxC.shape
  sizes = tuning.sizes("sparse_attention", "xla", queries=length)
  size = sizes["most_queries"]
  if view.rows_BxSxK is not None:
    per_query = max(1, batch * view.rows_BxSxK.shape[-1] * channels)
    size = max(sizes["least_queries"], min(size, sizes["gathered"] // per_query))
  return min(size, length)


def _window(view: View, dtype: jnp.dtype) -> jax.Array:
  """All window rows decoded: hardly longer than the call."""
  return read(view.window, view.tags_BxP >= 0, dtype)


def _slabs(
  window_BxPxC: jax.Array, view: View, length: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Window rows and tags with at least W - 1 in front, and the first slab row of each block."""
  n = blocks.count(length, size)
  before = window_BxPxC.shape[1] - length
  front, back = _front(view, length), n * size - length
  rows = jnp.pad(window_BxPxC, ((0, 0), (front, back), (0, 0)))
  tags = jnp.pad(view.tags_BxP, ((0, 0), (front, back)), constant_values=-1)
  return rows, tags, before + front - (view.width - 1) + size * jnp.arange(n)


def _front(view: View, length: int) -> int:
  """Empty rows to put in front of those from before the call."""
  return max(0, view.width - 1 - (view.window.shape[1] - length))


def inputs(q: jax.Array, positions: jax.Array, view: View, size: int) -> dict[str, jax.Array]:
  """What a loop runs over, cut into query blocks."""
  xs = {"q": blocks.split(q, size), "positions": blocks.split(positions, size, fill=-1)}
  if view.rows_BxSxK is not None:
    xs["rows"] = blocks.split(view.rows_BxSxK, size, fill=-1)
  return xs


def _block_scores(x, slab_BxLxC, tags_BxL, view: View, scale: float):
  """Masked scores of one block against its slab and its gathered entries."""
  q_BxQxHxC, positions_BxQ = x["q"], x["positions"]
  Q, L, W = q_BxQxHxC.shape[1], slab_BxLxC.shape[1], view.width
  back_QxL = jnp.arange(Q)[:, None] + (W - 1) - jnp.arange(L)
  expected_BxQxL = positions_BxQ[..., None] - back_QxL
  visible_BxQxL = (
    (back_QxL >= 0) & (back_QxL < W) & (expected_BxQxL >= 0) & (tags_BxL[:, None] == expected_BxQxL)
  )
  near = einsum("bqhc,blc->bqhl", q_BxQxHxC, slab_BxLxC) * scale
  near = jnp.where(visible_BxQxL[:, :, None], near, -jnp.inf)
  return near, *selected_scores(x, view, scale)


def selected_scores(
  x: dict[str, jax.Array], view: View, scale: float
) -> tuple[jax.Array | None, jax.Array | None]:
  """Masked scores of one block against its selected entries, and those; None without entries."""
  if view.rows_BxSxK is None:
    return None, None
  q_BxQxHxC, positions_BxQ, rows_BxQxK = x["q"], x["positions"], x["rows"]
  chosen = view.entries[jnp.maximum(rows_BxQxK, 0)]
  chosen_BxQxKxC = read(chosen, rows_BxQxK >= 0, q_BxQxHxC.dtype)
  far = einsum("bqhc,bqkc->bqhk", q_BxQxHxC, chosen_BxQxKxC) * scale
  selected_BxQxK = (rows_BxQxK >= 0) & (positions_BxQ[..., None] >= 0)
  return jnp.where(selected_BxQxK[:, :, None], far, -jnp.inf), chosen_BxQxKxC


def _offsets(near: jax.Array, far: jax.Array | None, sink_H: jax.Array) -> Offsets:
  largest = near.max(-1) if far is None else jnp.maximum(near.max(-1), far.max(-1))
  return offsets(largest, sink_H)


def _narrowed(p: jax.Array, values: jax.Array) -> jax.Array:
  """Probabilities as they multiply the values: in their dtype."""
  return round_to(p, values.dtype).astype(values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q, positions, view, sink):
  return _forward(scale, q, positions, view, sink)[0]


def _forward(scale, q, positions, view: View, sink):
  if one_query.applies(q, view):
    result = one_query.attend(q, positions, view, sink, scale)
  else:
    result = _in_blocks(scale, q, positions, view, sink)
  out, lse, mass = result.out_BxSxHxC, result.lse_BxSxH, result.mass_BxSxK
  return (out, lse, mass), (q, positions, view, sink, out, lse)


def _in_blocks(scale, q, positions, view: View, sink) -> Attended:
  length, size = q.shape[1], block_size(q, view)
  rows, tags, starts = _slabs(_window(view, q.dtype), view, length, size)
  slab = size + view.width - 1

  def block(x):
    slab_BxLxC = jax.lax.dynamic_slice_in_dim(rows, x["start"], slab, 1)
    tags_BxL = jax.lax.dynamic_slice_in_dim(tags, x["start"], slab, 1)
    near, far, chosen = _block_scores(x, slab_BxLxC, tags_BxL, view, scale)
    sink_H = sink.astype(jnp.float32)
    top = _offsets(near, far, sink_H)
    p_near = jnp.exp(near - top.keys[..., None])
    total = p_near.sum(-1)
    values = einsum("bqhl,blc->bqhc", _narrowed(p_near, slab_BxLxC), slab_BxLxC)
    if far is not None:
      p_far = jnp.exp(far - top.keys[..., None])
      total += p_far.sum(-1)
      values += einsum("bqhk,bqkc->bqhc", _narrowed(p_far, chosen), chosen)
    total = total * top.fade + jnp.exp(sink_H - top.all)
    share = (top.fade / total)[..., None]  # makes probabilities of p
    result = {"out": (values * share).astype(q.dtype), "lse": top.all + jnp.log(total)}
    if far is not None:
      result["mass"] = einsum("bqhk,bqh->bqk", p_far, share[..., 0])
    return result

  xs = inputs(q, positions, view, size) | {"start": starts}
  result = {k: blocks.join(v, length) for k, v in jax.lax.map(block, xs).items()}
  return Attended(result["out"], result["lse"], result.get("mass"))


def backward(scale: float, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
  """The backward pass of every backend.

  Args:
    saved: (q, positions, view, sink, out, lse) of the forward pass.
    gradients: of out and of lse.

  Returns:
    Gradients of the first four of `saved`.
  """
  q, positions, view, sink, out, lse = saved
  d_out, d_lse = gradients
  length, size = q.shape[1], block_size(q, view)
  read_window = lambda window: _window(dataclasses.replace(view, window=window), q.dtype)  # noqa: E731
  window_BxPxC, window_gradient = jax.vjp(read_window, view.window)
  rows, tags, starts = _slabs(window_BxPxC, view, length, size)
  slab = size + view.width - 1
  # Softmax backward: dscore = p * (dp - pull), with pull = sum(dout * out) - dlse.
  pull = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse

  def block(carry, x):
    d_rows, d_entries, d_sink = carry
    slab_BxLxC = jax.lax.dynamic_slice_in_dim(rows, x["start"], slab, 1)
    tags_BxL = jax.lax.dynamic_slice_in_dim(tags, x["start"], slab, 1)
    near, far, chosen = _block_scores(x, slab_BxLxC, tags_BxL, view, scale)
    q_BxQxHxC, d_out_BxQxHxC = x["q"], x["d_out"]
    pull_x = x["pull"][..., None]
    top = _offsets(near, far, sink).keys
    share = jnp.exp(top - x["lse"])[..., None]

    p = jnp.exp(near - top[..., None])
    ds = p * share * (einsum("bqhc,blc->bqhl", d_out_BxQxHxC, slab_BxLxC) - pull_x)
    d_q = einsum("bqhl,blc->bqhc", ds, slab_BxLxC) * scale
    d_slab = einsum("bqhl,bqhc->blc", ds, q_BxQxHxC) * scale
    used = round_to(p, slab_BxLxC.dtype) * share
    d_slab += einsum("bqhl,bqhc->blc", used, d_out_BxQxHxC)
    old = jax.lax.dynamic_slice_in_dim(d_rows, x["start"], slab, 1)
    d_rows = jax.lax.dynamic_update_slice_in_dim(d_rows, old + d_slab, x["start"], 1)
    if far is not None:
      p = jnp.exp(far - top[..., None])
      ds = p * share * (einsum("bqhc,bqkc->bqhk", d_out_BxQxHxC, chosen) - pull_x)
      d_q += einsum("bqhk,bqkc->bqhc", ds, chosen) * scale
      d_chosen = einsum("bqhk,bqhc->bqkc", ds, q_BxQxHxC) * scale
      used = round_to(p, chosen.dtype) * share
      d_chosen += einsum("bqhk,bqhc->bqkc", used, d_out_BxQxHxC)
      # Unselected places have p = ds = 0, so they add nothing to row 0.
      d_entries = d_entries.at[jnp.maximum(x["rows"], 0)].add(d_chosen)
    d_sink -= (jnp.exp(sink - x["lse"]) * x["pull"] * x["real"][..., None]).sum((0, 1))
    return (d_rows, d_entries, d_sink), d_q

  xs = inputs(q, positions, view, size)
  xs |= {
    "start": starts,
    "d_out": blocks.split(d_out, size),
    "lse": blocks.split(lse, size, jnp.inf),
    "pull": blocks.split(pull, size),
    "real": blocks.split(jnp.ones(q.shape[:2], jnp.float32), size),
  }
  entries = view.entries
  carry = (
    jnp.zeros(rows.shape, jnp.float32),
    None if entries is None else jnp.zeros(entries.shape, jnp.float32),
    jnp.zeros(sink.shape, jnp.float32),
  )
  (d_rows, d_entries, d_sink), d_q = jax.lax.scan(block, carry, xs)
  d_window = d_rows[:, _front(view, length) :][:, : view.window.shape[1]]
  d_view = View(
    window=window_gradient(d_window.astype(window_BxPxC.dtype))[0],
    tags_BxP=None,
    entries=None if entries is None else entries.with_gradient(d_entries),
    rows_BxSxK=None,
    width=view.width,
  )
  return blocks.join(d_q, length).astype(q.dtype), None, d_view, d_sink.astype(sink.dtype)


def _backward(scale, saved, gradients):
  d_out, d_lse, _ = gradients  # the mass has none
  return backward(scale, saved, (d_out, d_lse))


_attend.defvjp(_forward, _backward)
