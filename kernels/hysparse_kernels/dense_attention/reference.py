"""The plain definition: all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.compat import einsum
from hysparse_kernels.selection import span, top_visible


def _scores(q_BxSxHxC, k_BxTxGxC, lo_BxS, hi_BxS, scale):
  H, G = q_BxSxHxC.shape[2], k_BxTxGxC.shape[2]
  k_BxTxHxC = jnp.repeat(k_BxTxGxC, H // G, axis=2)
  scores_BxSxHxT = einsum("bshc,bthc->bsht", q_BxSxHxC, k_BxTxHxC) * scale
  visible_BxSxT = span(lo_BxS, hi_BxS, jnp.arange(k_BxTxGxC.shape[1]))
  return jnp.where(visible_BxSxT[:, :, None], scores_BxSxHxT, -jnp.inf), visible_BxSxT


def dense_attention(
  q_BxSxHxC: jax.Array,
  k_BxTxGxC: jax.Array,
  v_BxTxGxC: jax.Array,
  lo_BxS: jax.Array,
  hi_BxS: jax.Array,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  scores_BxSxHxT, visible_BxSxT = _scores(q_BxSxHxC, k_BxTxGxC, lo_BxS, hi_BxS, scale)
  blind_BxSx1 = ~visible_BxSxT.any(-1, keepdims=True)
  # A row without keys gets harmless scores first, so that its gradient is zero and not NaN.
  safe = jnp.where(blind_BxSx1[..., None], 0.0, scores_BxSxHxT)
  lse_BxSxH = jax.nn.logsumexp(safe, axis=-1)
  probs = jnp.where(visible_BxSxT[:, :, None], jnp.exp(safe - lse_BxSxH[..., None]), 0.0)
  H, G = q_BxSxHxC.shape[2], k_BxTxGxC.shape[2]
  out = einsum("bsht,bthc->bshc", probs, jnp.repeat(v_BxTxGxC, H // G, axis=2))
  return out.astype(q_BxSxHxC.dtype), jnp.where(blind_BxSx1, -jnp.inf, lse_BxSxH)


def oracle_top_k(
  q_BxSxHxC: jax.Array,
  k_BxTxGxC: jax.Array,
  lo_BxS: jax.Array,
  hi_BxS: jax.Array,
  lse_BxSxH: jax.Array,
  scale: float,
  top_k: int,
  reduce: str,
) -> jax.Array:
  scores_BxSxHxT, visible_BxSxT = _scores(q_BxSxHxC, k_BxTxGxC, lo_BxS, hi_BxS, scale)
  probs = jnp.exp(scores_BxSxHxT - lse_BxSxH[..., None])
  return top_visible(getattr(probs, reduce)(2), visible_BxSxT, top_k)
