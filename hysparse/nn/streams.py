"""The residual streams: how a sublayer reads from them and writes to them.

Source: arXiv 2609.19969, section 2.4 (single-pass mHC); `two_pass` and `plain` are ablations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels import hyper_connections as hc
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init
from hysparse.nn.execution import Execution


class Mix(NamedTuple):
  """What a sublayer has made of the streams that entered it.

  Attributes:
    pre_BxSxM: the fold that it hands on.
    own: its coefficients; None in a plain residual.
  """

  pre_BxSxM: Float[Array, "B S M"]
  own: hc.Coefficients | None = None


class Streams(nnx.Module):
  """Connects one sublayer (attention or MoE) with M residual streams.

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

  def enter(
    self, x_BxSxMxD: Float[Array, "B S M D"], pre_BxSxM: Float[Array, "B S M"]
  ) -> tuple[Float[Array, "B S D"], Mix]:
    """What the sublayer reads, and how its result enters the streams.

    Args:
      pre_BxSxM: the fold that the previous sublayer handed on.
    """
    B, S, M, D = x_BxSxMxD.shape
    if self.config.residual == "plain":
      return x_BxSxMxD[:, :, 0], Mix(pre_BxSxM)
    x_NxMxD = x_BxSxMxD.reshape(B * S, M, D)
    mix = hc.coefficients(x_NxMxD, **self._mixing(), backend=self.run.backend)
    own = self.config.residual == "two_pass"
    pre_NxM = mix.pre_NxM if own else pre_BxSxM.reshape(B * S, M)
    u_NxD = hc.fold(x_NxMxD, pre_NxM, backend=self.run.backend)
    return u_NxD.reshape(B, S, D), Mix(mix.pre_NxM.reshape(B, S, M), mix)

  def leave(
    self, x_BxSxMxD: Float[Array, "B S M D"], y_BxSxD: Float[Array, "B S D"], mix: Mix
  ) -> Float[Array, "B S M D"]:
    """The streams after the sublayer, which returned y."""
    B, S, M, D = x_BxSxMxD.shape
    if mix.own is None:
      return x_BxSxMxD + y_BxSxD[:, :, None]
    x_NxMxD, y_NxD = x_BxSxMxD.reshape(B * S, M, D), y_BxSxD.reshape(B * S, D)
    post_NxM, comb_NxMxM = mix.own.post_NxM, mix.own.comb_NxMxM
    x_NxMxD = hc.update(x_NxMxD, y_NxD, post_NxM, comb_NxMxM, backend=self.run.backend)
    return x_NxMxD.reshape(B, S, M, D)

  def leave_for(
    self,
    following: Streams,
    x_BxSxMxD: Float[Array, "B S M D"],
    y_BxSxD: Float[Array, "B S D"],
    mix: Mix,
  ) -> tuple[Float[Array, "B S M D"], Float[Array, "B S D"], Mix]:
    """`leave`, and `following.enter` with the fold handed on; in one pass over the streams."""
    if self.config.residual != "single_pass":
      x_BxSxMxD = self.leave(x_BxSxMxD, y_BxSxD, mix)
      return x_BxSxMxD, *following.enter(x_BxSxMxD, mix.pre_BxSxM)
    B, S, M, D = x_BxSxMxD.shape
    x_NxMxD, u_NxD, own = hc.advance(
      x_BxSxMxD.reshape(B * S, M, D),
      y_BxSxD.reshape(B * S, D),
      mix.own.post_NxM,
      mix.own.comb_NxMxM,
      mix.own.pre_NxM,
      **following._mixing(),
      backend=self.run.backend,
    )
    mix = Mix(own.pre_NxM.reshape(B, S, M), own)
    return x_NxMxD.reshape(B, S, M, D), u_NxD.reshape(B, S, D), mix

  def read(
    self, x_BxSxMxD: Float[Array, "B S M D"], pre_BxSxM: Float[Array, "B S M"]
  ) -> Float[Array, "B S D"]:
    """What a sublayer would read, without running it."""
    return self.enter(x_BxSxMxD, pre_BxSxM)[0]

  def _mixing(self) -> dict[str, Any]:
    """What `hc.coefficients` takes besides the streams."""
    return {
      "fn_QxP": self.fn[...],
      "base_Q": self.base[...],
      "scale_3": self.scale[...],
      "iters": self.config.sinkhorn_iters,
      "eps": self.config.hc_eps,
      "norm_eps": self.config.norm_eps,
    }


def begin(embedded_BxSxD: Float[Array, "B S D"], streams: int) -> tuple[jax.Array, jax.Array]:
  """M copies of the embedding, and the first fold: the first stream alone."""
  x_BxSxMxD = jnp.repeat(embedded_BxSxD[:, :, None], streams, axis=2)
  one_hot = jnp.zeros((*embedded_BxSxD.shape[:2], streams), jnp.float32).at[..., 0].set(1.0)
  return x_BxSxMxD, one_hot
