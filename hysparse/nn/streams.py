"""The residual streams: how a sublayer reads from them and writes to them.

Source: arXiv 2609.19969, section 2.4 (single-pass mHC); `two_pass` and `plain` are ablations.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels import hyper_connections as hc
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init
from hysparse.nn.execution import Execution


class Streams(nnx.Module):
  """Wraps one sublayer (attention or MoE) around M residual streams.

  `single_pass`: the fold `pre` that a sublayer computes is used by the next one, so that it is
  ready before the sublayer's input is. `two_pass`: used by the sublayer itself. `plain`: one stream
  with an ordinary residual and no parameters.
  """

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.run = config, run
    if config.residual != "plain":
      M = config.streams
      shape = ((2 + M) * M, M * config.d_model)
      self.fn = nnx.Param(init.table(rngs.params(), shape, shape[1] ** -0.5))
      self.base = nnx.Param(init.mix_base(M))
      self.scale = nnx.Param(jnp.full((3,), init.MIX_SCALE, jnp.float32))

  def __call__(
    self,
    x_BxSxMxD: Float[Array, "B S M D"],
    pre_BxSxM: Float[Array, "B S M"],
    sublayer: Callable,
  ) -> tuple[Float[Array, "B S M D"], Float[Array, "B S M"], tuple]:
    """Runs `sublayer(u_BxSxD) -> (y_BxSxD, *rest)`.

    Args:
      pre_BxSxM: the fold that the previous sublayer handed on.

    Returns:
      The streams after the sublayer, the fold for the next one, and `rest`.
    """
    B, S, M, D = x_BxSxMxD.shape
    if self.config.residual == "plain":
      y_BxSxD, *rest = sublayer(x_BxSxMxD[:, :, 0])
      return x_BxSxMxD + y_BxSxD[:, :, None], pre_BxSxM, tuple(rest)
    backend = self.run.backend
    x_NxMxD = x_BxSxMxD.reshape(B * S, M, D)
    mix = self._mix(x_NxMxD)
    own = self.config.residual == "two_pass"
    pre_NxM = mix.pre_NxM if own else pre_BxSxM.reshape(B * S, M)
    u_NxD = hc.fold(x_NxMxD, pre_NxM, backend=backend)
    y_BxSxD, *rest = sublayer(u_NxD.reshape(B, S, D))
    y_NxD = y_BxSxD.reshape(B * S, D)
    x_NxMxD = hc.update(x_NxMxD, y_NxD, mix.post_NxM, mix.comb_NxMxM, backend=backend)
    return x_NxMxD.reshape(B, S, M, D), mix.pre_NxM.reshape(B, S, M), tuple(rest)

  def read(
    self, x_BxSxMxD: Float[Array, "B S M D"], pre_BxSxM: Float[Array, "B S M"]
  ) -> Float[Array, "B S D"]:
    """What a sublayer would read, without running it."""
    B, S, M, D = x_BxSxMxD.shape
    if self.config.residual == "plain":
      return x_BxSxMxD[:, :, 0]
    x_NxMxD, pre_NxM = x_BxSxMxD.reshape(B * S, M, D), pre_BxSxM.reshape(B * S, M)
    if self.config.residual == "two_pass":
      pre_NxM = self._mix(x_NxMxD).pre_NxM
    return hc.fold(x_NxMxD, pre_NxM, backend=self.run.backend).reshape(B, S, D)

  def _mix(self, x_NxMxD: Float[Array, "N M D"]) -> hc.Coefficients:
    return hc.coefficients(
      x_NxMxD,
      self.fn[...],
      self.base[...],
      self.scale[...],
      iters=self.config.sinkhorn_iters,
      eps=self.config.hc_eps,
      norm_eps=self.config.norm_eps,
      backend=self.run.backend,
    )


def begin(embedded_BxSxD: Float[Array, "B S D"], streams: int) -> tuple[jax.Array, jax.Array]:
  """M copies of the embedding, and the first fold: the first stream alone."""
  x_BxSxMxD = jnp.repeat(embedded_BxSxD[:, :, None], streams, axis=2)
  one_hot = jnp.zeros((*embedded_BxSxD.shape[:2], streams), jnp.float32).at[..., 0].set(1.0)
  return x_BxSxMxD, one_hot
