"""The same model with every layer's parameters in arrays of their own, for decoding.

Training and checkpoints keep the parameters of a run of equal layers stacked. A step that decodes
one token reads every weight once, and taking a layer out of its stack would copy it first. The same
holds for an expert of a layer; there the gain is small and must be asked for.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx
from hysparse_kernels.formats import Quantised
from hysparse_kernels.moe import Separate

from hysparse.config import ModelConfig
from hysparse.nn.execution import Execution
from hysparse.nn.model import Model


def unstack(
  graphdef: nnx.GraphDef, state: nnx.State, *, separate_experts: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
  """A graph and arrays that `forward` takes like the others; the old arrays stay as they are.

  Runs of one layer share their arrays with the old state if that can be done without a copy. A
  model that is unstacked already comes back as it is.

  Args:
    separate_experts: plain experts get arrays of their own, too (`hysparse_kernels.moe.Separate`).
      On the CPU fewer bytes are moved for each token; programs take longer to compile, for they
      have a branch for each expert of each layer.
  """
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
      if separate_experts and "experts" in path and not isinstance(layer.get_value(), Quantised):
        layer = layer.replace(Separate.of(layer.get_value()))
      leaves.append((("runs", path[1], i, *path[2:]), layer))
  return _graphdef(model.config, model.run), nnx.from_flat_state(leaves)


@functools.lru_cache(maxsize=16)
def _graphdef(config: ModelConfig, run: Execution) -> nnx.GraphDef:
  run = dataclasses.replace(run, stacked=False)
  return nnx.split(nnx.eval_shape(lambda: Model(config, run, rngs=nnx.Rngs(params=0))))[0]
