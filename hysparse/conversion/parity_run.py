"""What our model computes for one run of a case, under the names that expected.npz uses.

Prefill with a cache, then one token at a time through the same cache: nothing is computed twice.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from hysparse.cache.allocate import allocate
from hysparse.cache.state import Cache
from hysparse.config import Config, ModelConfig
from hysparse.conversion.parity_case import Case, Run
from hysparse.nn.batch import Batch
from hysparse.nn.calls import Output
from hysparse.nn.engram import tables
from hysparse.nn.model import abstract, draft, forward
from hysparse.nn.vision import encode_image

_MAIN_HIDDEN = 2  # draft inputs of the last two prefill positions are stored


def end_to_end(state: nnx.State, config: Config, case: Case, run: Run) -> dict[str, np.ndarray]:
  """Everything a run gives, named as in expected.npz without the mode: "A/prefill_logits".

  The cache is packed where `config.train.numerics` rounds what it holds.

  Raises:
    CacheError: the cache lost track of a sequence.
  """
  stored, graphdef = case.expected, abstract(config)[0]
  tokens = jnp.asarray(stored[f"{run.name}/tokens"], jnp.int32)
  room = max(r.prompt + r.steps for r in case.runs)  # the same for all runs: one decode program
  cache = allocate(config, tokens.shape[0], room)
  batch = Batch.of(tokens[:, : run.prompt], is_prompt=True)
  batch, found = _with_images(graphdef, state, batch, case, run)
  logits, cache, told = _prefill(
    graphdef, state, batch, cache, jnp.asarray(stored[f"{run.name}/logit_positions"])
  )
  found |= {"prefill_logits": logits} | told
  found |= _cached(config.model, cache, run.prompt)

  steps = []
  drafts_at = set(stored.get(f"{run.name}/dspark_steps", np.zeros(0, int)).tolist())
  for t in range(run.steps):
    token = Batch.of(tokens[:, run.prompt + t : run.prompt + t + 1])
    logits, cache, told = _step(graphdef, state, token, cache)
    steps.append({"decode_logits": logits} | told)
    if config.model.draft_layers and t in drafts_at:
      drafted = _draft(graphdef, state, cache, tokens[:, run.prompt + t + 1])
      found[f"dspark{t}/ids"] = drafted.ids_BxN
      found[f"dspark{t}/logits"] = drafted.logits_BxNxV
      found[f"dspark{t}/confidence"] = drafted.confidence_BxN
  cache.check()
  found = {name: _plain(value) for name, value in found.items()}
  decoded = {
    name: np.stack([_plain(step[name]) for step in steps]) for name in (steps[0] if steps else {})
  }
  positions = stored.get(f"{run.name}/resid_positions", np.zeros(0, int))
  for name in [name for name in found if name.endswith("/residual")]:
    found[name] = found[name][:, positions]
  if "engram_rows" in found:
    rows = [found.pop("engram_rows")]
    if decoded:
      rows.append(np.moveaxis(decoded.pop("engram_rows")[:, :, 0], 0, 1))
    found["engram_hash_ids"] = np.concatenate(rows, axis=1)
  return {f"{run.name}/{name}": value for name, value in (found | decoded).items()}


def hash_constants(config: ModelConfig) -> dict[str, np.ndarray]:
  """Primes, offsets and multipliers of the Engram tables, named as in expected.npz."""
  if not config.engram_layers:
    return {}
  each = tables(config)
  return {
    "engram/primes": np.asarray([t.primes for t in each], np.int64),
    "engram/offsets": np.asarray([np.ravel(t.offsets) for t in each], np.int64),
    "engram/multipliers": np.asarray([t.multipliers for t in each], np.int64),
  }


def choices(config: ModelConfig, run: Run) -> dict[str, np.ndarray]:
  """For each selection and pool of a run, which of its rows leave something out.

  Masks [1, S] of the prefill and [steps, 1] of decode, by the names of the arrays.
  """
  found = {}
  for i, spec in enumerate(config.layers):
    if not spec.has_indexer:
      continue
    visible = (np.arange(run.prompt + run.steps) + 1) // spec.ratio
    free = visible > config.top_k
    found[f"{run.name}/layer{i}/topk"] = free[None, : run.prompt]
    found[f"{run.name}/layer{i}/decode_topk"] = free[run.prompt :, None]
    if spec.candidate_role == "source":
      blocks = -(-visible // config.candidate_block_size)
      free = blocks > config.candidate_blocks
      found[f"{run.name}/layer{i}/candidates"] = free[None, : run.prompt]
  return found


# --- Compiled once per shape ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
  graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, cache: Cache, at_N: Int[Array, "N"]
) -> tuple[Array, Cache, dict[str, Array]]:
  at_BxN = jnp.broadcast_to(at_N, (batch.tokens_BxS.shape[0], at_N.shape[0]))
  output = forward(graphdef, state, batch, cache, logits_at=at_BxN, capture=True)
  config = nnx.merge(graphdef, state).config
  told = _engram_rows(config, output)
  if output.main_hidden_BxSxTD is not None:
    told["main_hidden"] = output.main_hidden_BxSxTD[:, -_MAIN_HIDDEN:]
  for i, trace in enumerate(output.aux.trace):
    spec, name = config.layers[i], f"layer{i}"
    told[f"{name}/residual"] = trace["streams"]
    told[f"{name}/experts"] = trace["experts"]
    told[f"{name}/expert_weights"] = trace["expert_weights"]
    if spec.has_indexer and trace["ids"] is not None:
      told[f"{name}/topk"] = trace["ids"]
    if spec.candidate_role == "source" and trace["pool"] is not None:
      told[f"{name}/candidates"] = trace["pool"].mask(batch.tokens_BxS.shape[1] // spec.ratio)
  return output.logits_BxNxV, output.cache, told


@functools.partial(jax.jit, static_argnums=0)
def _step(
  graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, cache: Cache
) -> tuple[Array, Cache, dict[str, Array]]:
  output = forward(graphdef, state, batch, cache, capture=True)
  config = nnx.merge(graphdef, state).config
  told = _engram_rows(config, output)
  for i, trace in enumerate(output.aux.trace):
    if config.layers[i].has_indexer and trace["ids"] is not None:
      told[f"layer{i}/decode_topk"] = trace["ids"][:, 0]
  return output.logits_BxNxV[:, 0], output.cache, told


_draft = jax.jit(draft, static_argnums=0)
_encode = jax.jit(encode_image, static_argnums=(0, 3))


def _engram_rows(config: ModelConfig, output: Output) -> dict[str, Array]:
  """{"engram_rows": [B, S, Engram layers, columns]}, layers as listed; {} without Engram."""
  rows = [output.aux.trace[i]["engram_rows"] for i in config.engram_layers]
  return {"engram_rows": jnp.stack(rows, axis=2)} if rows else {}


def _plain(x: Array) -> np.ndarray:
  """On the host; bfloat16 as float32."""
  return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


# --- Around the model -----------------------------------------------------------------------------


def _with_images(
  graphdef: nnx.GraphDef, state: nnx.State, batch: Batch, case: Case, run: Run
) -> tuple[Batch, dict[str, Array]]:
  """The prefill with its token types and aligner rows, and the rows of each image by name."""
  types = case.expected.get(f"{run.name}/token_types")
  if types is None:
    return batch, {}
  batch = dataclasses.replace(batch, token_types_BxS=jnp.asarray(types, jnp.int32))
  found, rows = {}, []
  for b in range(len(types)):
    images = case.images(run, b)
    each = [_encode(graphdef, state, jnp.asarray(x.patches), x.grid) for _, x in images]
    found |= {f"{name}/embeds": embeds for (name, _), embeds in zip(images, each, strict=True)}
    rows.append(jnp.concatenate(each) if each else None)
  if not found:
    return batch, {}
  longest = max(len(x) for x in rows if x is not None)
  width, dtype = next((x.shape[1], x.dtype) for x in rows if x is not None)
  rows = [jnp.zeros((0, width), dtype) if x is None else x for x in rows]
  padded = [jnp.pad(x, ((0, longest - len(x)), (0, 0))) for x in rows]
  return dataclasses.replace(batch, images_BxNxD=jnp.stack(padded)), found


def _cached(config: ModelConfig, cache: Cache, length: int) -> dict[str, Array]:
  """Window rows that were ever written, entries and index keys, by layer."""
  found = {}
  for run_cache, (first, count) in zip(cache.layers, config.layers.runs(), strict=True):
    for i in range(first, first + count):
      at, name = i - first, f"layer{i}"
      if run_cache.window is not None:
        # The slots that a position reached; `Case` cuts the stored rings the same way.
        found[f"{name}/window_kv"] = run_cache.window.rows[at, :, :length].decode()
      for pools in run_cache.pools[at : at + 1]:
        ratio = max(config.layers[i].ratio, 1)
        rows = {"compressed_kv": pools.main_kv, "index_k": pools.index_keys}
        for kind in (kind for kind in rows if rows[kind] is not None):
          entries = cache.pages.of(rows[kind], ratio).values(jnp.float32)
          found[f"{name}/{kind}"] = entries[:, : length // ratio]
  return found
