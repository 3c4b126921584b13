"""What the kernels are measured against: the same work written out, or its floor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hysparse_kernels import blocks
from hysparse_kernels.formats import Stored
from jaxtyping import Array, Float, Int


def decoded(
  entries: Stored, rows_BxSxK: Int[Array, "B S K"], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "B S K C"]:
  """The selected rows gathered and dequantised, written out as one array.

  The barrier is what "written out" means: otherwise XLA fuses it with whatever comes next.
  """
  return jax.lax.optimization_barrier(entries[rows_BxSxK].decode(dtype))


def in_cache(
  q_BxSxHxC: Float[Array, "B S H C"],
  entries: Stored,
  rows_BxSxK: Int[Array, "B S K"],
  window_BxWxC: Float[Array, "B W C"],
  queries: int,
) -> Float[Array, "B S H C"]:
  """Gather, dequantise and the two products of sparse attention without its softmax.

  In blocks of a few queries, so that what is decoded stays in cache.
  """

  def block(x):
    q, rows = x["q"], x["rows"]
    keys = entries[rows].decode(q.dtype)
    near = jnp.einsum("bqhc,bwc->bqhw", q, window_BxWxC)
    far = jnp.einsum("bqhc,bqkc->bqhk", q, keys)
    return jnp.einsum("bqhw,bwc->bqhc", near, window_BxWxC) + jnp.einsum(
      "bqhk,bqkc->bqhc", far, keys
    )

  xs = {"q": blocks.split(q_BxSxHxC, queries), "rows": blocks.split(rows_BxSxK, queries)}
  return blocks.join(jax.lax.map(block, xs), q_BxSxHxC.shape[1])


def dense(
  q_SxHxC: Float[Array, "S H C"], entries: Stored, size: int = 1024
) -> Float[Array, "S H C"]:
  """Attention of every query to all entries, in key blocks with a running softmax."""

  def step(carry, start):
    top, total, out = carry
    rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), entries)
    keys = rows.decode(q_SxHxC.dtype)
    scores = jax.lax.optimization_barrier(jnp.einsum("shc,tc->sht", q_SxHxC, keys))
    above = jnp.maximum(top, scores.max(-1))
    p, fade = jnp.exp(scores - above[..., None]), jnp.exp(top - above)
    values = jnp.einsum("sht,tc->shc", p, keys)
    return (above, total * fade + p.sum(-1), out * fade[..., None] + values), None

  S, H, _ = q_SxHxC.shape
  carry = (jnp.full((S, H), -jnp.inf), jnp.zeros((S, H)), jnp.zeros_like(q_SxHxC))
  (_, total, out), _ = jax.lax.scan(step, carry, jnp.arange(0, entries.shape[0], size))
  return out / total[..., None]


def score_products(
  q_SxIxD: Float[Array, "S I D"], keys_TxD: Float[Array, "T D"], size: int = 256
) -> Float[Array, "S T"]:
  """The products of the index scores in key blocks, one head's kept: what scoring cannot avoid."""
  S, heads, D = q_SxIxD.shape
  flat = q_SxIxD.reshape(S * heads, D)

  def block(keys_NxD):
    dots = jax.lax.optimization_barrier(flat @ keys_NxD.T)
    return dots.reshape(S, heads, -1)[:, 0]

  out = jax.lax.map(block, keys_TxD.reshape(-1, size, D))
  return jnp.moveaxis(out, 0, 1).reshape(S, -1)


def pooled_scores(
  q_SxIxD: Float[Array, "S I D"], keys: Stored, ids_SxP: Int[Array, "S P"], top_k: int
) -> Int[Array, "S K"]:
  """Gather, dequantise, products and top-k inside each query's pool, a query at a time."""

  def one(x):
    dots = jax.lax.optimization_barrier(x["q"] @ keys[x["ids"]].decode().T)
    return jax.lax.top_k(dots[0], top_k)[1]

  return jax.lax.map(one, {"q": q_SxIxD, "ids": ids_SxP})


def ragged_moe(
  x_NxD: Float[Array, "N D"],
  ids_NxA: Int[Array, "N A"],
  weights_NxA: Float[Array, "N A"],
  w_gate: Float[Array, "E D F"],
  w_up: Float[Array, "E D F"],
  w_down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
  """The routed experts through `jax.lax.ragged_dot`: choices sorted by expert, no clamp."""
  A = ids_NxA.shape[1]
  order = jnp.argsort(ids_NxA.reshape(-1), stable=True)
  counts_E = jnp.bincount(ids_NxA.reshape(-1), length=w_gate.shape[0])
  x = x_NxD[order // A]
  inner = jax.nn.silu(jax.lax.ragged_dot(x, w_gate, counts_E))
  inner *= jax.lax.ragged_dot(x, w_up, counts_E) * weights_NxA.reshape(-1)[order][:, None]
  y = jax.lax.ragged_dot(inner, w_down, counts_E)
  return jnp.zeros_like(x_NxD).at[order // A].add(y)
