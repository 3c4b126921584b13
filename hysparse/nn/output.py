"""The grouped output projection of attention."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init
from hysparse.nn.linear import Linear


class GroupedOutput(nnx.Module):
  """Heads in G groups, each projected to a low rank of its own, then one matrix to the width.

  Source: arXiv 2609.19969, section 2.2.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    c = config
    inputs = c.n_heads // c.o_groups * c.head_dim
    self.wo_a = GroupedLinear(c.o_groups, inputs, c.o_rank, rngs=rngs)
    gain = init.residual_gain(len(c.layers))
    self.wo_b = Linear(c.o_groups * c.o_rank, c.d_model, rngs=rngs, gain=gain)

  def __call__(self, out_BxSxHxC: Float[Array, "B S H C"]) -> Float[Array, "B S D"]:
    return self.wo_b(self.wo_a(out_BxSxHxC))


class GroupedLinear(nnx.Module):
  """A block-diagonal matrix: weight is [groups, inputs, outputs]."""

  def __init__(self, groups: int, inputs: int, outputs: int, *, rngs: nnx.Rngs):
    self.weight = nnx.Param(init.matrix(rngs.params(), (groups, inputs, outputs)))

  def __call__(self, x_BxSxHxC: Float[Array, "B S H C"]) -> Float[Array, "B S GO"]:
    weight_GxIxO = self.weight[...].astype(x_BxSxHxC.dtype)
    G, inputs, _ = weight_GxIxO.shape
    B, S = x_BxSxHxC.shape[:2]
    y = jnp.einsum("bsgi,gio->bsgo", x_BxSxHxC.reshape(B, S, G, inputs), weight_GxIxO)
    return y.reshape(B, S, -1)
