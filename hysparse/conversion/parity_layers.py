"""What each of our layers computes on the stored inputs of a case, named as in layers.npz.

Every layer gets the stored streams and mix that entered it; keys, entries and selections come from
the layers before it in the same call. So an error of one layer does not reach the next, except
through what the layers publish.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.compat import einsum
from hysparse_kernels.indexer.scores import weighted
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.conversion.parity_case import Case, CaseError
from hysparse.nn.batch import Batch
from hysparse.nn.block import Carry, Wanted
from hysparse.nn.handoff import Published


def layer_by_layer(
  graphdef: nnx.GraphDef, state: nnx.State, config: ModelConfig, case: Case
) -> dict[str, np.ndarray]:
  """Arrays "layer{i}/..." in float32: output [S, M, D], attn_out, next_pre_mix, topk, engram_out.

  The stored run is `Case.layered_run`, batch row 0. In official mode also topk_scores [S, T], by
  which a selection can be judged that differs from the stored one.

  Raises:
    CaseError: a layer without a stored input.
  """
  run, stored = case.layered_run, case.expected
  streams, mixes, before = [], [], {}
  for i, spec in enumerate(config.layers):
    left = f"official/layer{i - 1}/output"
    streams.append(_first(case, f"layer{i}/input", left))
    mixes.append(_first(case, f"layer{i}/pre_mix"))
    if spec.engram and i:
      before[i] = _first(case, left)
    elif spec.engram:
      embedded_SxD = _first(case, "layer0/engram_input")
      before[0] = np.repeat(embedded_SxD[:, None], config.streams, axis=1)
  batch = Batch.of(jnp.asarray(stored[f"{run.name}/tokens"][:1, : run.prompt]), is_prompt=True)
  types = stored.get(f"{run.name}/token_types")
  if types is not None:
    batch = dataclasses.replace(batch, token_types_BxS=jnp.asarray(types[:1], jnp.int32))
  found = _layers(graphdef, state, batch, np.stack(streams), np.stack(mixes), before)
  return {name: np.asarray(value) for name, value in found.items()}


@functools.partial(jax.jit, static_argnums=0)
def _layers(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batch: Batch,
  streams_LxSxMxD: Float[Array, "L S M D"],
  mixes_LxSxM: Float[Array, "L S M"],
  before: dict[int, Float[Array, "S M D"]],
) -> dict[str, Array]:
  model = nnx.merge(graphdef, state)
  dtype, inputs = model.run.dtype, model.inputs(batch)
  published, found = Published(), {}
  for i, spec in enumerate(model.config.layers):
    layer, name = model.layer(i), f"layer{i}"
    if i in before:
      remembered, _ = layer.remember(before[i][None].astype(dtype), inputs)
      found[f"{name}/engram_out"] = remembered[0]
    carry = Carry(streams_LxSxMxD[i][None].astype(dtype), mixes_LxSxM[i][None])
    passed = layer.transform(carry, inputs, published, wanted=Wanted(trace=True))
    published = passed.published
    found[f"{name}/output"] = passed.carry.x_BxSxMxD[0]
    found[f"{name}/next_pre_mix"] = passed.carry.pre_BxSxM[0]
    found[f"{name}/attn_out"] = passed.aux.trace["attention"][0]
    if spec.has_indexer and published.ids_BxSxK is not None:
      found[f"{name}/topk"] = published.ids_BxSxK[0]
      if model.run.official:
        queries, weights = passed.aux.trace["index"]
        keys = published.index_keys.values(queries.dtype)
        dots = einsum("bsid,btd->bsit", queries, keys)
        found[f"{name}/topk_scores"] = weighted(dots, weights, released_rounding=True)[0]
  return {name: x if x.dtype == jnp.int32 else x.astype(jnp.float32) for name, x in found.items()}


def _first(case: Case, *names: str) -> np.ndarray:
  """The first of the arrays that the case has."""
  for name in names:
    if name in case.layers:
      return case.layers[name]
  raise CaseError(f"layers.npz: lacks {' and '.join(names)}")
