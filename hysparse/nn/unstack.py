"""The same model with every layer's parameters in arrays of their own, for decoding.

Training and checkpoints keep the parameters of a run of equal layers stacked. A step that decodes
one token reads every weight once, and taking a layer out of its stack would copy it first. On the
CPU the same holds for the experts of a layer; there they get arrays of their own, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from flax import nnx
from hysparse_kernels import compat
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import Separate

from hysparse.config import ModelConfig
from hysparse.nn.execution import Execution
from hysparse.nn.model import Model

_MOST_BRANCHES = 64  # experts; each is a part of the compiled program
_LEAST_VALUES = 2**14  # of a matrix


def unstack(graphdef: nnx.GraphDef, state: nnx.State) -> tuple[nnx.GraphDef, nnx.State]:
  """A graph and arrays that `forward` takes like the others; the old arrays stay as they are.

  Runs of one layer share their arrays with the old state if that can be done without a copy. A
  model that is unstacked already comes back as it is.
  """
  separates = compat.platform() == "cpu"
  model = nnx.merge(graphdef, state)
  if not model.run.stacked:
    return graphdef, state
  counts = [count for _, count in model.config.layers.runs()]
  leaves = []
  for path, leaf in nnx.to_flat_state(state):
    if path[0] != "runs":
      leaves.append((path, leaf))
      continue
    for i in range(counts[path[1]]):
      # A host table is no array: it stays as it is.
      layer = jax.tree.map(lambda x, i=i: x[i], leaf)
      if separates and "experts" in path and _is_worth_it(layer.get_value()):
        layer = layer.replace(Separate.of(layer.get_value()))
      leaves.append((("runs", path[1], i, *path[2:]), layer))
  return _graphdef(model.config, model.run), nnx.from_flat_state(leaves)


def _is_worth_it(experts: jax.Array | Quantised) -> bool:
  """Whether a copy of a matrix costs more than a choice between branches, and those are few."""
  if isinstance(experts, Quantised):
    return False
  E, *matrix = experts.shape
  return E <= _MOST_BRANCHES and math.prod(matrix) >= _LEAST_VALUES


@functools.lru_cache(maxsize=16)
def _graphdef(config: ModelConfig, run: Execution) -> nnx.GraphDef:
  run = dataclasses.replace(run, stacked=False)
  return nnx.split(nnx.eval_shape(lambda: Model(config, run, rngs=nnx.Rngs(params=0))))[0]
