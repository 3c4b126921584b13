"""What a cache holds in kvquant, to the bit: given equal inputs, against NumPy in float64.

Each layer of a golden case gets its stored input. The window rows, entries and index keys of ours
must be the very numbers that the NumPy model rounds to, except where its value before rounding is
so near the border between two codes that float32 decides; there they are one of the two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_codecs as codecs
import pytest
import released_folders as folders
from flax import nnx
from independent_reader import Folder
from numpy_model import Choices, NumpyModel, fold

import hysparse
from hysparse.conversion import parity_case
from hysparse.nn.batch import Batch
from hysparse.nn.block import Carry, Wanted
from hysparse.nn.handoff import Published
from hysparse.nn.model import abstract

# Float32 moves a value by less than this, relative to the largest of its row: norms and products
# of a few hundred terms. Nearer to a border than that, either code is right.
BORDER = 2e-6
DECIDED = 0.99  # share of values that are further away

CODECS = {"window": codecs.fp8, "entries": codecs.fp4, "index_keys": codecs.mxfp4}


@functools.partial(jax.jit, static_argnums=0)
def cached(graphdef, state, streams_LxSxMxD, mixes_LxSxM, batch):
  """Per layer what it adds to the cache; nothing of attention and experts is left to compile."""
  model = nnx.merge(graphdef, state)
  inputs, found = model.inputs(batch), []
  for i, spec in enumerate(model.config.layers):
    carry = Carry(streams_LxSxMxD[i][None], mixes_LxSxM[i][None])
    wanted = Wanted(trace=True)
    trace = model.layer(i).transform(carry, inputs, Published(), wanted=wanted).aux.trace
    values = {"window": trace["window"].decode}
    if spec.is_source:
      values |= {name: trace[name].values for name in ("entries", "index_keys")}
    found.append({name: value(jnp.float32)[0] for name, value in values.items()})
  return found


def unrounded(oracle: NumpyModel, i: int, streams_SxMxD, mixes_SxM) -> dict[str, np.ndarray]:
  """The same in float64, before it is rounded."""
  p = f"layers.{i}"
  x_SxD = oracle.norm(fold(streams_SxMxD, mixes_SxM), f"{p}.attn_norm")
  found = {"window": oracle.window_keys(p, x_SxD, np.arange(len(x_SxD)), i)}
  if i in oracle.t["kv_source_layer_ids"]:
    qr = oracle.norm(oracle.linear(x_SxD, f"{p}.attn.wq_a"), f"{p}.attn.q_norm")
    own = oracle.global_branch(p, i, x_SxD, qr, {}, Choices())
    found |= {"entries": own["entries"], "index_keys": own["keys"]}
  return found


@pytest.mark.parametrize("name", folders.CASES)
def test_cached_values_are_equal_to_the_bit(name):
  case, loaded = parity_case.read(folders.GOLDEN / name), hysparse.load(folders.GOLDEN / name)
  train = dataclasses.replace(loaded.config.train, numerics="kvquant")
  graphdef = abstract(dataclasses.replace(loaded.config, train=train))[0]
  layers = range(len(loaded.config.model.layers))
  tokens = case.expected["A/tokens"][:1, : case.runs[0].prompt]
  streams = [
    case.layers.get(f"layer{i}/input", case.layers.get(f"official/layer{i - 1}/output"))
    for i in layers
  ]
  mixes = [case.layers[f"layer{i}/pre_mix"] for i in layers]
  ours = cached(
    graphdef, loaded.state, np.stack(streams), np.stack(mixes), Batch.of(jnp.asarray(tokens))
  )

  oracle = NumpyModel(Folder(folders.GOLDEN / name), None, quantised=False)
  for i in layers:
    before_rounding = unrounded(oracle, i, streams[i].astype(np.float64), mixes[i])
    assert before_rounding.keys() == ours[i].keys()
    for what, mine in ours[i].items():
      raw, codec = before_rounding[what], CODECS[what]
      shift = BORDER * np.abs(raw).max(-1, keepdims=True)
      below, right, above = codec(raw - shift), codec(raw), codec(raw + shift)
      decided = (below == right) & (above == right)
      assert decided.mean() > DECIDED, (i, what)
      mine = np.asarray(mine)
      assert (mine[decided] == right[decided]).all(), (i, what)
      assert ((mine == below) | (mine == right) | (mine == above)).all(), (i, what)
