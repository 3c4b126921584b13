"""The operations as callers see them."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from hysparse_kernels import arguments, dispatch
from hysparse_kernels.hyper_connections import pallas_tpu, reference, xla

_BACKENDS = {"reference": reference, "xla": xla, "pallas_tpu": pallas_tpu}
COEFFICIENTS = {name: backend.coefficients for name, backend in _BACKENDS.items()}
FOLD = {name: backend.fold for name, backend in _BACKENDS.items()}
UPDATE = {name: backend.update for name, backend in _BACKENDS.items()}
ADVANCE = {name: backend.advance for name, backend in _BACKENDS.items()}


class Coefficients(NamedTuple):
  """What one sublayer computes from the streams that enter it, float32.

  In the single-pass model `pre` folds the streams for the NEXT sublayer, `post` and `comb` update
  them after this one.
  """

  pre_NxM: Float[Array, "N M"]
  post_NxM: Float[Array, "N M"]
  comb_NxMxM: Float[Array, "N M M"]


class Advanced(NamedTuple):
  """What `advance` leaves: new streams, what the next sublayer reads, and its coefficients."""

  x_NxMxD: Float[Array, "N M D"]
  u_NxD: Float[Array, "N D"]
  coefficients: Coefficients


def coefficients(
  x_NxMxD: Float[Array, "N M D"],
  fn_QxP: Float[Array, "Q P"],
  base_Q: Float[Array, "Q"],
  scale_3: Float[Array, "3"],
  *,
  iters: int,
  eps: float,
  norm_eps: float,
  backend: str = "auto",
) -> Coefficients:
  """The mixing coefficients of a sublayer; `comb` is nearly doubly stochastic (Sinkhorn).

  Computed in float32. The Q = (2 + M) M mixes are ordered pre, post, comb (row-major).

  Args:
    fn_QxP: one row for each mix, over the P = M D channels of all streams, stream-major.
    base_Q: added to the scaled mixes.
    scale_3: factors on the mixes of pre, post and comb.
    iters: normalisations of comb's columns, at least 1; its rows are normalised in between.
    eps: added to pre, to comb after its softmax and to every sum it is divided by.
    norm_eps: joins the mean square of the P channels.

  Raises:
    ValueError: parameters whose shapes do not fit the streams, fewer than 1 iteration, an eps that
      is no number from 0 up.

  Source: arXiv 2609.19969, single-pass mHC.
  """
  _check_mixing(x_NxMxD, fn_QxP, base_Q, scale_3, iters, eps, norm_eps)
  run = dispatch.select("hyper_connections.coefficients", backend, COEFFICIENTS)
  return Coefficients(*run(x_NxMxD, fn_QxP, base_Q, scale_3, iters, eps, norm_eps))


def fold(
  x_NxMxD: Float[Array, "N M D"], pre_NxM: Float[Array, "N M"], *, backend: str = "auto"
) -> Float[Array, "N D"]:
  """What a sublayer reads: sum_m pre[m] x[m], summed in float32, in x's dtype.

  Raises:
    ValueError: shapes that do not fit each other.
  """
  arguments.sizes(x_NxMxD=x_NxMxD, pre_NxM=pre_NxM)
  return dispatch.select("hyper_connections.fold", backend, FOLD)(x_NxMxD, pre_NxM)


def update(
  x_NxMxD: Float[Array, "N M D"],
  y_NxD: Float[Array, "N D"],
  post_NxM: Float[Array, "N M"],
  comb_NxMxM: Float[Array, "N M M"],
  *,
  backend: str = "auto",
) -> Float[Array, "N M D"]:
  """The streams after a sublayer: x'[j] = post[j] y + sum_i comb[i, j] x[i].

  The summed axis is comb's first. Computed in float32, in x's dtype.

  Raises:
    ValueError: shapes that do not fit each other.
  """
  arguments.sizes(x_NxMxD=x_NxMxD, y_NxD=y_NxD, post_NxM=post_NxM, comb_NxMxM=comb_NxMxM)
  run = dispatch.select("hyper_connections.update", backend, UPDATE)
  return run(x_NxMxD, y_NxD, post_NxM, comb_NxMxM)


def advance(
  x_NxMxD: Float[Array, "N M D"],
  y_NxD: Float[Array, "N D"],
  post_NxM: Float[Array, "N M"],
  comb_NxMxM: Float[Array, "N M M"],
  pre_NxM: Float[Array, "N M"],
  fn_QxP: Float[Array, "Q P"],
  base_Q: Float[Array, "Q"],
  scale_3: Float[Array, "3"],
  *,
  iters: int,
  eps: float,
  norm_eps: float,
  backend: str = "auto",
) -> Advanced:
  """From one sublayer to the next: `update`, then `fold` and `coefficients` of the new streams.

  The same as these three, in one pass over the streams where a backend has it.

  Args:
    y_NxD: what the sublayer returned; post and comb are its coefficients.
    pre_NxM: the fold for the next sublayer. The other parameters are the next one's, too.

  Raises:
    ValueError: shapes that do not fit each other, numbers as in `coefficients`.
  """
  _check_mixing(x_NxMxD, fn_QxP, base_Q, scale_3, iters, eps, norm_eps)
  arguments.sizes(
    x_NxMxD=x_NxMxD, y_NxD=y_NxD, post_NxM=post_NxM, comb_NxMxM=comb_NxMxM, pre_NxM=pre_NxM
  )
  run = dispatch.select("hyper_connections.advance", backend, ADVANCE)
  x_NxMxD, u_NxD, mixed = run(
    x_NxMxD,
    y_NxD,
    post_NxM,
    comb_NxMxM,
    pre_NxM,
    fn_QxP,
    base_Q,
    scale_3,
    iters,
    eps,
    norm_eps,
  )
  return Advanced(x_NxMxD, u_NxD, Coefficients(*mixed))


def _check_mixing(x_NxMxD, fn_QxP, base_Q, scale_3, iters, eps, norm_eps) -> None:
  sizes = arguments.sizes(x_NxMxD=x_NxMxD, fn_QxP=fn_QxP, base_Q=base_Q, scale_3=scale_3)
  M, D = sizes["M"], sizes["D"]
  if (sizes["Q"], sizes["P"]) != ((2 + M) * M, M * D):
    raise ValueError(
      f"fn_QxP: has shape {list(fn_QxP.shape)}; must be [{(2 + M) * M}, {M * D}] for {M} streams"
      f" of {D}"
    )
  arguments.floats(x_NxMxD=x_NxMxD)
  arguments.whole("iters", iters)
  arguments.real("eps", eps, 0)
  arguments.real("norm_eps", norm_eps, 0)
