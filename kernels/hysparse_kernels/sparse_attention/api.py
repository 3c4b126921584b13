"""The operation as callers see it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import arguments, dispatch, triton_launch
from hysparse_kernels.sparse_attention import pallas_gpu, pallas_tpu, reference, xla
from hysparse_kernels.sparse_attention.view import Attended, View

BACKENDS = {
  "reference": reference.sparse_attention,
  "xla": xla.sparse_attention,
  "pallas_tpu": pallas_tpu.sparse_attention,
  "pallas_gpu": pallas_gpu.sparse_attention,
  "triton": triton_launch.lazy("sparse_attention", "sparse_attention"),
}


def sparse_attention(
  q_BxSxHxC: Float[Array, "B S H C"],
  positions_BxS: Int[Array, "B S"],
  view: View,
  sink_H: Float[Array, " H"],
  *,
  scale: float,
  backend: str = "auto",
) -> Attended:
  """Softmax over the window keys and the selected entries together, with one sink per head.

  Window and selection are concatenated, never de-duplicated: a token may count twice. All heads
  share one key, which is also the value. The sink is a logit of its own: not scaled, without a
  value, in the denominator only; so a query with no key gives zeros. Differentiable in the
  queries, the window, the entries and the sink, through `out` and `lse`.

  Scores, probabilities and their sum are float32. Where the keys are narrower, probabilities
  (relative to the largest score of the query's keys) are rounded to their dtype for the product
  with them, as the released code does; gradients pass straight through that.

  Args:
    q_BxSxHxC: queries, rotated.
    positions_BxS: position of each query inside its document; negative: sees nothing.
    view: the keys, see `View`.
    sink_H: sink logits, float32.
    scale: factor on the scores, released: C^-0.5.
    backend: "auto" or a name of `BACKENDS`.

  Raises:
    ValueError: arrays whose shapes or dtypes do not fit each other, or a scale that is no number.
    BackendError: a backend that is not there or cannot run here.

  Source: arXiv 2609.19969, section 2.2.
  """
  run = dispatch.select("sparse_attention", backend, BACKENDS)
  view = jax.tree.map(jnp.asarray, view)
  _check(q_BxSxHxC, positions_BxS, view, sink_H)
  positions_BxS = positions_BxS.astype(jnp.int32)
  return run(q_BxSxHxC, positions_BxS, _as_int32(view), sink_H, arguments.real("scale", scale))


def _check(q_BxSxHxC, positions_BxS, view: View, sink_H) -> None:
  own = {"q_BxSxHxC": q_BxSxHxC, "positions_BxS": positions_BxS, "sink_H": sink_H}
  own |= {"window_BxPxC": view.window, "tags_BxP": view.tags_BxP}
  if (view.entries is None) != (view.rows_BxSxK is None):
    raise ValueError("view: has one of entries and rows_BxSxK; must have both or none")
  if view.entries is not None:
    own |= {"entries_RxC": view.entries, "rows_BxSxK": view.rows_BxSxK}
    arguments.integers(rows_BxSxK=view.rows_BxSxK)
  sizes = arguments.sizes(**own)
  if sizes["P"] < sizes["S"]:
    raise ValueError(
      f"window_BxPxC: has {sizes['P']} rows; must have one for each of the {sizes['S']} queries"
    )
  arguments.whole("width", view.width)
  arguments.floats(q_BxSxHxC=q_BxSxHxC, sink_H=sink_H)
  arguments.integers(positions_BxS=positions_BxS, tags_BxP=view.tags_BxP)


def _as_int32(view: View) -> View:
  rows_BxSxK = view.rows_BxSxK
  return dataclasses.replace(
    view,
    tags_BxP=view.tags_BxP.astype(jnp.int32),
    rows_BxSxK=None if rows_BxSxK is None else rows_BxSxK.astype(jnp.int32),
  )
