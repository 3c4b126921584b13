"""The operations as callers see them."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hysparse_kernels import arguments, dispatch
from hysparse_kernels.dense_attention import reference, xla
from hysparse_kernels.sparse_attention.view import Attended

_ATTEND = {"reference": reference.dense_attention, "xla": xla.dense_attention}
_ORACLE = {"reference": reference.oracle_top_k, "xla": xla.oracle_top_k}


def dense_attention(
  q_BxSxHxC: Float[Array, "B S H C"],
  k_BxTxGxC: Float[Array, "B T G C"],
  v_BxTxGxC: Float[Array, "B T G C"],
  lo_BxS: Int[Array, "B S"],
  hi_BxS: Int[Array, "B S"],
  *,
  scale: float,
  backend: str = "auto",
) -> Attended:
  """Softmax attention of query s to the entries lo <= t < hi, in key blocks; no sink.

  G key heads serve H/G consecutive query heads each. A query that sees nothing gives zeros and a
  log-denominator of -inf. Differentiable in q, k and v, through `out` and `lse`; memory grows with
  S + T, never S x T.

  Raises:
    ValueError: arrays whose shapes or dtypes do not fit each other, a scale that is no number.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("dense_attention", backend, _ATTEND)
  _check(q_BxSxHxC, lo_BxS, hi_BxS, k_BxTxGxC=k_BxTxGxC, v_BxTxGxC=v_BxTxGxC)
  scale = arguments.real("scale", scale)
  return Attended(*run(q_BxSxHxC, k_BxTxGxC, v_BxTxGxC, lo_BxS, hi_BxS, scale))


def oracle_top_k(
  q_BxSxHxC: Float[Array, "B S H C"],
  k_BxTxGxC: Float[Array, "B T G C"],
  lo_BxS: Int[Array, "B S"],
  hi_BxS: Int[Array, "B S"],
  lse_BxSxH: Float[Array, "B S H"],
  *,
  scale: float,
  top_k: int,
  reduce: Literal["max", "sum"] = "max",
  backend: str = "auto",
) -> Int[Array, "B S K"]:
  """The entries that hold the most attention: ascending, -1 for none, ties to the lower entry.

  Args:
    lse_BxSxH: log-denominator of the whole attention (window and sink included), which makes heads
      comparable.
    reduce: an entry's rank over the heads: "max" is the selection a dense layer publishes (arXiv
      2602.03560), "sum" the attention mass against which indexers are measured.

  Raises:
    ValueError: as `dense_attention`; a `top_k` that is no whole number from 1 up, another `reduce`.
    BackendError: a backend that is not there or cannot run here.
  """
  run = dispatch.select("oracle_top_k", backend, _ORACLE)
  _check(q_BxSxHxC, lo_BxS, hi_BxS, k_BxTxGxC=k_BxTxGxC, lse_BxSxH=lse_BxSxH)
  scale, top_k = arguments.real("scale", scale), arguments.whole("top_k", top_k)
  if reduce not in ("max", "sum"):
    raise ValueError(f"reduce: is {reduce!r}; must be 'max' or 'sum'")
  return run(q_BxSxHxC, k_BxTxGxC, lo_BxS, hi_BxS, lse_BxSxH, scale, top_k, reduce)


def _check(q_BxSxHxC, lo_BxS, hi_BxS, **keys) -> None:
  sizes = arguments.sizes(q_BxSxHxC=q_BxSxHxC, lo_BxS=lo_BxS, hi_BxS=hi_BxS, **keys)
  if sizes["H"] % sizes["G"]:
    raise ValueError(
      f"k_BxTxGxC: has {sizes['G']} heads; must divide the {sizes['H']} of the queries"
    )
  arguments.floats(q_BxSxHxC=q_BxSxHxC)
  arguments.integers(lo_BxS=lo_BxS, hi_BxS=hi_BxS)


def merge(a: Attended, b: Attended) -> Attended:
  """One softmax over the keys of both, from two that were normalised apart.

  At most one of the two may hold a row without any key.
  """
  lse = jnp.logaddexp(a.lse_BxSxH, b.lse_BxSxH)
  parts = [
    x.out_BxSxHxC.astype(jnp.float32) * jnp.exp(x.lse_BxSxH - lse)[..., None] for x in (a, b)
  ]
  return Attended((parts[0] + parts[1]).astype(a.out_BxSxHxC.dtype), lse)
