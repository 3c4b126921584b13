"""The grouped output projection of attention."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init, weights
from hysparse.nn.execution import Execution
from hysparse.nn.linear import Linear


class GroupedOutput(nnx.Module):
  """Heads in G groups, each projected to a low rank of its own, then one matrix to the width.

  Source: arXiv 2609.19969, section 2.2.
  """

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    c = config
    inputs = c.n_heads // c.o_groups * c.head_dim
    self.wo_a = GroupedLinear(c.o_groups, inputs, c.o_rank, rngs=rngs)
    gain = init.residual_gain(len(c.layers))
    wide = c.o_groups * c.o_rank
    self.wo_b = Linear(wide, c.d_model, rngs=rngs, gain=gain, fp8_input=run.official)

  def __call__(self, out_BxSxHxC: Float[Array, "B S H C"]) -> Float[Array, "B S D"]:
    return self.wo_b(self.wo_a(out_BxSxHxC))


class GroupedLinear(nnx.Module):
  """A block-diagonal matrix: weight is [groups, inputs, outputs]. Its input is never quantised."""

  def __init__(self, groups: int, inputs: int, outputs: int, *, rngs: nnx.Rngs):
    self.groups = groups
    self.weight = nnx.Param(init.matrix(rngs.params(), (groups, inputs, outputs)))

  def __call__(self, x_BxSxHxC: Float[Array, "B S H C"]) -> Float[Array, "B S GO"]:
    B, S = x_BxSxHxC.shape[:2]
    y = weights.grouped_matmul(x_BxSxHxC.reshape(B, S, self.groups, -1), self.weight)
    return y.reshape(B, S, -1)
