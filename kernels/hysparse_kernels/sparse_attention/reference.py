"""The plain definition: every query's keys written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import round_to
from hysparse_kernels.sparse_attention.softmax import offsets
from hysparse_kernels.sparse_attention.view import Attended, View, read


def sparse_attention(
  q_BxSxHxC: jax.Array, positions_BxS: jax.Array, view: View, sink_H: jax.Array, scale: float
) -> Attended:
  S, W = q_BxSxHxC.shape[1], view.width
  window_BxPxC = read(view.window, view.tags_BxP >= 0, q_BxSxHxC.dtype)
  before = window_BxPxC.shape[1] - S

  # Window row of query s, d tokens back: before + s - d.
  back_W = jnp.arange(W)[::-1]
  at_SxW = before + jnp.arange(S)[:, None] - back_W
  expected_BxSxW = positions_BxS[..., None] - back_W
  tags_BxSxW = view.tags_BxP[:, jnp.maximum(at_SxW, 0)]
  visible_BxSxN = (at_SxW >= 0) & (expected_BxSxW >= 0) & (tags_BxSxW == expected_BxSxW)
  keys_BxSxNxC = window_BxPxC[:, jnp.maximum(at_SxW, 0)]
  dtypes = [keys_BxSxNxC.dtype]

  if view.rows_BxSxK is not None:
    rows_BxSxK = view.rows_BxSxK
    chosen = view.entries[jnp.maximum(rows_BxSxK, 0)]
    chosen_BxSxKxC = read(chosen, rows_BxSxK >= 0, q_BxSxHxC.dtype)
    dtypes.append(chosen_BxSxKxC.dtype)
    selected_BxSxK = (rows_BxSxK >= 0) & (positions_BxS[..., None] >= 0)
    keys_BxSxNxC = jnp.concatenate([keys_BxSxNxC, chosen_BxSxKxC], axis=2)
    visible_BxSxN = jnp.concatenate([visible_BxSxN, selected_BxSxK], axis=2)

  scores_BxSxHxN = einsum("bshc,bsnc->bshn", q_BxSxHxC, keys_BxSxNxC) * scale
  scores_BxSxHxN = jnp.where(visible_BxSxN[:, :, None], scores_BxSxHxN, -jnp.inf)
  sink_H = sink_H.astype(jnp.float32)
  top = offsets(scores_BxSxHxN.max(-1), sink_H)
  p_BxSxHxN = jnp.exp(scores_BxSxHxN - top.keys[..., None])
  total_BxSxH = p_BxSxHxN.sum(-1) * top.fade + jnp.exp(sink_H - top.all)
  lse_BxSxH = top.all + jnp.log(total_BxSxH)
  share_BxSxHx1 = (top.fade / total_BxSxH)[..., None]  # makes probabilities of p
  # Window and entries may have two dtypes: each part's probabilities are rounded to its own.
  parts = jnp.split(p_BxSxHxN, [W], axis=-1)
  used = [round_to(part, dtype) for part, dtype in zip(parts, dtypes, strict=False)]
  values = einsum("bshn,bsnc->bshc", jnp.concatenate(used, axis=-1), keys_BxSxNxC)
  out = (values * share_BxSxHx1).astype(q_BxSxHxC.dtype)
  mass = None
  if view.rows_BxSxK is not None:
    mass = jax.lax.stop_gradient((p_BxSxHxN[..., W:] * share_BxSxHx1).sum(2))
  return Attended(out, lse_BxSxH, mass)
