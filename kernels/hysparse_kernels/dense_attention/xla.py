"""Portable backend: query blocks against key blocks with a running softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from hysparse_kernels import blocks
from hysparse_kernels.compat import einsum
from hysparse_kernels.selection import span, top_visible

_QUERIES, _KEYS = 128, 128
_MASKED = -1e30  # finite, so that a block in which a query sees nothing leaves no NaN


def dense_attention(q, k, v, lo, hi, scale: float) -> tuple[jax.Array, jax.Array]:
  return _attend(scale, q, k, v, lo, hi)


def _grouped(x_BxQxHxC: jax.Array, groups: int) -> jax.Array:
  """[B, Q, H, C] -> [B, Q, G, H/G, C]."""
  B, Q, H, C = x_BxQxHxC.shape
  return x_BxQxHxC.reshape(B, Q, groups, H // groups, C)


def _key_blocks(k: jax.Array, *more: jax.Array) -> tuple[jax.Array, ...]:
  """(first entry of each block, [blocks, B, keys, ...] of k and of the others)."""
  size = min(_KEYS, k.shape[1])
  parts = [blocks.split(x, size) for x in (k, *more)]
  return size * jnp.arange(parts[0].shape[0]), *parts


def _scores(q_BxQxGxNxC, k_BxKxGxC, start, lo_BxQ, hi_BxQ, scale):
  ids = start + jnp.arange(k_BxKxGxC.shape[1])
  visible_BxQxK = span(lo_BxQ, hi_BxQ, ids)
  scores = einsum("bqgnc,bkgc->bqgnk", q_BxQxGxNxC, k_BxKxGxC) * scale
  return jnp.where(visible_BxQxK[:, :, None, None], scores, _MASKED)


def _any_visible(start, size: int, lo_BxQ, hi_BxQ) -> jax.Array:
  return ((lo_BxQ < start + size) & (hi_BxQ > jnp.maximum(start, lo_BxQ))).any()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q, k, v, lo, hi):
  return _forward(scale, q, k, v, lo, hi)[0]


def _query_blocks(q, lo, hi) -> dict[str, jax.Array]:
  size = min(_QUERIES, q.shape[1])
  return {"q": blocks.split(q, size), "lo": blocks.split(lo, size), "hi": blocks.split(hi, size)}


def _forward(scale, q, k, v, lo, hi):
  G = k.shape[2]
  starts, k_blocks, v_blocks = _key_blocks(k, v)
  size = k_blocks.shape[2]

  def query_block(x):
    q_BxQxGxNxC = _grouped(x["q"], G)

    def key_block(carry, y):
      start, k_BxKxGxC, v_BxKxGxC = y

      def attend(carry):
        top, total, out = carry
        scores = _scores(q_BxQxGxNxC, k_BxKxGxC, start, x["lo"], x["hi"], scale)
        new = jnp.maximum(top, scores.max(-1))
        p = jnp.where(scores > _MASKED, jnp.exp(scores - new[..., None]), 0.0)
        shrink = jnp.exp(top - new)
        out = out * shrink[..., None] + einsum("bqgnk,bkgc->bqgnc", p, v_BxKxGxC)
        return new, total * shrink + p.sum(-1), out

      seen = _any_visible(start, size, x["lo"], x["hi"])
      return jax.lax.cond(seen, attend, lambda carry: carry, carry), None

    shape = q_BxQxGxNxC.shape
    empty = (jnp.full(shape[:-1], _MASKED), jnp.zeros(shape[:-1]), jnp.zeros(shape, jnp.float32))
    (top, total, out), _ = jax.lax.scan(key_block, empty, (starts, k_blocks, v_blocks))
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-38)), -jnp.inf)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    B, Q, _, _, C = shape
    return out.reshape(B, Q, -1, C).astype(q.dtype), lse.reshape(B, Q, -1)

  out, lse = jax.lax.map(query_block, _query_blocks(q, lo, hi))
  out, lse = blocks.join(out, q.shape[1]), blocks.join(lse, q.shape[1])
  return (out, lse), (q, k, v, lo, hi, out, lse)


def _backward(scale, saved, gradients):
  q, k, v, lo, hi, out, lse = saved
  d_out, d_lse = gradients
  G = k.shape[2]
  starts, k_blocks, v_blocks = _key_blocks(k, v)
  size = k_blocks.shape[2]
  pull = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  pull -= jnp.where(lse == -jnp.inf, 0.0, d_lse)
  safe_lse = jnp.where(lse == -jnp.inf, 0.0, lse)

  def query_block(carry, x):
    q_x, d_out_x = _grouped(x["q"], G), _grouped(x["d_out"], G)
    lse_x, pull_x = (_grouped(x[name][..., None], G) for name in ("lse", "pull"))

    def key_block(d_q, y):
      start, k_y, v_y, d_k, d_v = y

      def attend(d_q, d_k, d_v):
        scores = _scores(q_x, k_y, start, x["lo"], x["hi"], scale)
        p = jnp.where(scores > _MASKED, jnp.exp(scores - lse_x), 0.0)
        ds = p * (einsum("bqgnc,bkgc->bqgnk", d_out_x, v_y) - pull_x) * scale
        d_q += einsum("bqgnk,bkgc->bqgnc", ds, k_y)
        d_k += einsum("bqgnk,bqgnc->bkgc", ds, q_x)
        d_v += einsum("bqgnk,bqgnc->bkgc", p, d_out_x)
        return d_q, d_k, d_v

      seen = _any_visible(start, size, x["lo"], x["hi"])
      d_q, d_k, d_v = jax.lax.cond(seen, attend, lambda *same: same, d_q, d_k, d_v)
      return d_q, (d_k, d_v)

    zero = jnp.zeros(q_x.shape, jnp.float32)
    d_q, carry = jax.lax.scan(key_block, zero, (starts, k_blocks, v_blocks, *carry))
    return carry, d_q.reshape(x["q"].shape)

  rows = q.shape[1]
  xs = _query_blocks(q, lo, hi)
  block = xs["q"].shape[2]
  xs |= {"d_out": blocks.split(d_out, block), "lse": blocks.split(safe_lse, block)}
  xs |= {"pull": blocks.split(pull, block)}
  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_blocks, v_blocks))
  (d_k, d_v), d_q = jax.lax.scan(query_block, zeros, xs)
  d_k, d_v = (blocks.join(x, k.shape[1]) for x in (d_k, d_v))
  return (
    blocks.join(d_q, rows).astype(q.dtype),
    d_k.astype(k.dtype),
    d_v.astype(v.dtype),
    None,
    None,
  )


_attend.defvjp(_forward, _backward)


def oracle_top_k(q, k, lo, hi, lse, scale: float, top_k: int, reduce: str) -> jax.Array:
  G, T = k.shape[2], k.shape[1]
  starts, k_blocks = _key_blocks(k)

  def query_block(x):
    q_BxQxGxNxC, lse_x = _grouped(x["q"], G), _grouped(x["lse"][..., None], G)

    def key_block(y):
      start, k_BxKxGxC = y
      scores = _scores(q_BxQxGxNxC, k_BxKxGxC, start, x["lo"], x["hi"], scale)
      return getattr(jnp.exp(scores - lse_x), reduce)((2, 3))

    rank_BxQxT = blocks.join(
      jnp.moveaxis(jax.lax.map(key_block, (starts, k_blocks)), 3, 2), T
    ).swapaxes(1, 2)
    return top_visible(rank_BxQxT, span(x["lo"], x["hi"], jnp.arange(T)), top_k)

  xs = _query_blocks(q, lo, hi)
  xs["lse"] = blocks.split(lse, xs["q"].shape[2])
  return blocks.join(jax.lax.map(query_block, xs), q.shape[1])
