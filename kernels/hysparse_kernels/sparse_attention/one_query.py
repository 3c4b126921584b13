"""One query a sequence, as in decoding: its window and its selected entries are one array of keys.

The loop over query blocks (xla.py) has two pairs of products, because a block's queries share their
window rows. One query shares them with none, and its few products are faster as one pair.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import round_to
from hysparse_kernels.sparse_attention.softmax import offsets
from hysparse_kernels.sparse_attention.view import Attended, View, dtype_of, read


def applies(q_BxSxHxC: Float[Array, "B S H C"], view: View) -> bool:
  """Whether a call has one query a sequence, and keys of one dtype from two places."""
  if q_BxSxHxC.shape[1] != 1 or view.entries is None:
    return False
  dtype = q_BxSxHxC.dtype
  return dtype_of(view.window, dtype) == dtype_of(view.entries, dtype)


def attend(
  q_Bx1xHxC: Float[Array, "B 1 H C"],
  positions_Bx1: Int[Array, "B 1"],
  view: View,
  sink_H: Float[Array, "H"],
  scale: float,
) -> Attended:
  """Forward pass of `sparse_attention` where it applies."""
  q_BxHxC, rows_BxK = q_Bx1xHxC[:, 0], view.rows_BxSxK[:, 0]
  selected = rows_BxK.shape[1]
  chosen_BxKxC = read(view.entries[jnp.maximum(rows_BxK, 0)], rows_BxK >= 0, q_BxHxC.dtype)
  window_BxWxC, seen_BxW = _window(view, positions_Bx1, q_BxHxC.dtype)
  # The barrier has the keys written once: both products read them.
  keys_BxNxC = jax.lax.optimization_barrier(jnp.concatenate([chosen_BxKxC, window_BxWxC], 1))
  there_BxN = jnp.concatenate([(rows_BxK >= 0) & (positions_Bx1 >= 0), seen_BxW], 1)

  scores_BxHxN = einsum("bhc,bnc->bhn", q_BxHxC, keys_BxNxC) * scale
  scores_BxHxN = jnp.where(there_BxN[:, None], scores_BxHxN, -jnp.inf)
  sink_H = sink_H.astype(jnp.float32)
  top = offsets(scores_BxHxN.max(-1), sink_H)
  p_BxHxN = jnp.exp(scores_BxHxN - top.keys[..., None])
  total_BxH = p_BxHxN.sum(-1) * top.fade + jnp.exp(sink_H - top.all)
  share_BxH = top.fade / total_BxH  # makes probabilities of p
  used_BxHxN = round_to(p_BxHxN, keys_BxNxC.dtype).astype(keys_BxNxC.dtype)
  out_BxHxC = einsum("bhn,bnc->bhc", used_BxHxN, keys_BxNxC) * share_BxH[..., None]
  mass_BxK = einsum("bhk,bh->bk", p_BxHxN[..., :selected], share_BxH)
  lse_BxH = top.all + jnp.log(total_BxH)
  return Attended(out_BxHxC[:, None].astype(q_BxHxC.dtype), lse_BxH[:, None], mass_BxK[:, None])


def _window(view: View, positions_Bx1: Int[Array, "B 1"], dtype: jnp.dtype):
  """The newest W window rows (or all, if there are fewer), and which of them the query sees."""
  width = min(view.width, view.window.shape[1])
  tags_BxW = view.tags_BxP[:, -width:]
  expected_BxW = positions_Bx1 - jnp.arange(width)[::-1]
  rows = jax.tree.map(lambda x: x[:, -width:], view.window)
  return read(rows, tags_BxW >= 0, dtype), (expected_BxW >= 0) & (tags_BxW == expected_BxW)
