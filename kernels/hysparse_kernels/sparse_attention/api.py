"""The operation as callers see it."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from hysparse_kernels import dispatch, triton_launch
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

  Source: arXiv 2609.19969, section 2.2.
  """
  run = dispatch.select("sparse_attention", backend, BACKENDS)
  return run(q_BxSxHxC, positions_BxS, view, sink_H, scale)
