"""The language model: embedding, runs of layers, final norm and head."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels import hyper_connections as hc
from hysparse_kernels.compat import einsum
from jaxtyping import Array, Float, Int

from hysparse.cache import layout
from hysparse.cache.settle import Pending, appended, settle
from hysparse.cache.state import Cache, LayerCache
from hysparse.config import Config, ConfigError, ModelConfig
from hysparse.nn import init, streams
from hysparse.nn.batch import Batch
from hysparse.nn.block import Block, Carry, Inputs, Passed, Wanted
from hysparse.nn.calls import Call, Drafted, Hidden, Output
from hysparse.nn.drafts import Drafts
from hysparse.nn.engram import Ids, TokenMap
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import Kept, LayerAux, Published
from hysparse.nn.image_span import Delimiters, Grid
from hysparse.nn.linear import RMSNorm
from hysparse.nn.vision import Aligner, VisionTower

_WHOLE = Call()

Split = tuple[nnx.GraphDef, nnx.State]


class Table(nnx.Module):
  """Rows [vocabulary, width] of the embedding or the head."""

  def __init__(self, config: ModelConfig, std: float, *, rngs: nnx.Rngs):
    shape = (config.vocab_size, config.d_model)
    self.weight = nnx.Param(init.table(rngs.params(), shape, std))


class Model(nnx.Module):
  """Runs of equal layers keep their parameters stacked on axis 0; they are scanned or unrolled."""

  def __init__(
    self,
    config: ModelConfig,
    run: Execution,
    *,
    rngs: nnx.Rngs,
    token_map: Int[np.ndarray, " V"] | None = None,
  ):
    self.config, self.run = config, run
    self.embed = Table(config, init.EMBEDDING_STD, rngs=rngs)
    if config.engram_layers:
      same = np.arange(config.vocab_size)
      self.token_map = TokenMap(jnp.asarray(same if token_map is None else token_map, jnp.int32))

    def stack(first: int, count: int) -> Block | nnx.List[Block]:
      keys = jax.random.split(rngs.params(), count)
      make = lambda key: Block(config, first, run, rngs=nnx.Rngs(params=key))  # noqa: E731
      return nnx.vmap(make)(keys) if run.stacked else nnx.List([make(key) for key in keys])

    self.runs = nnx.List([stack(*run_of_layers) for run_of_layers in config.layers.runs()])
    self.norm = RMSNorm(config.d_model, config.norm_eps)
    self.head = Table(config, init.HEAD_STD * config.d_model**-0.5, rngs=rngs)
    if config.draft_layers:
      self.drafts = Drafts(config, run, rngs=rngs)
    if config.vision_layers:
      self.vision = VisionTower(config, run, rngs=rngs)
      self.aligner = Aligner(config, rngs=rngs)
      self.image = Delimiters(config, rngs=rngs)

  def hidden(self, batch: Batch, cache: Cache | None = None, call: Call = _WHOLE) -> Hidden:
    """States behind the final norm, in the compute dtype, and what the layers told.

    Args:
      cache: state of the sequences that the rows of `batch` continue.

    Raises:
      ValueError: a batch that does not fit the model or the cache, or a call that does not fit the
        schedule.
    """
    call.check(self.config, self.run, batch, cache)
    if cache is not None:
      batch = batch.continuing(cache)
    inputs = self.inputs(batch, cache)
    carry, published = Carry(*streams.begin(self._embed(batch), self.config.streams)), Published()
    drafts_read = self.config.draft_layers and (cache is not None or call.capture)
    targets = self.config.draft_target_layers if drafts_read else ()
    kept_tokens = None if call.defer else layout.kept_tokens(self.config)
    runs, entering = [], {}
    for r, (first, count) in enumerate(self.config.layers.runs()):
      inside = [t for t in targets if first <= t < first + count]
      run_cache = None if cache is None else cache.layers[r]
      wanted = Wanted(call.capture, bool(inside), kept_tokens)
      last = None
      if call.replays and first == self.config.layers.decoder_start:
        if call.more:
          kept = self.layer(first).publish(carry, inputs, _alone(run_cache), kept_tokens)
          runs.append(Passed(carry, published, kept, None))
          break
        last = self.config.window
      passed = self._run(r, carry, inputs, published, run_cache, wanted, last)
      if last is not None:
        inputs = dataclasses.replace(inputs, batch=inputs.batch.last(last))
      carry, published = passed.carry, passed.published
      entering |= {t: passed.aux.entering_BxSxD[t - first] for t in inside}
      runs.append(passed)
    told = [
      dataclasses.replace(run.aux, entering_BxSxD=None, trace=None) for run in runs if run.aux
    ]
    aux = jax.tree.map(lambda *xs: jnp.concatenate(xs), *told)
    if call.capture:
      aux = dataclasses.replace(aux, trace=[trace for run in runs for trace in run.aux.trace])
    main = None
    if len(entering) == len(targets) > 0:
      size = min(x.shape[1] for x in entering.values())
      cut = {t: x if x.shape[1] == size else batch.tail(x, size) for t, x in entering.items()}
      main = jnp.concatenate([cut[t] for t in targets], axis=-1)
    pending = None
    if cache is not None:
      pending = self._pending(batch, inputs.ids, aux, runs, main, kept_tokens)
      cache = appended(cache, [run.kept.pools for run in runs])
      if not call.defer:
        cache, pending = settle(cache, pending), None
    return Hidden(self.norm(self._fold(carry)), inputs.batch, cache, pending, aux, main)

  def _run(
    self,
    index: int,
    carry: Carry,
    inputs: Inputs,
    published: Published,
    cache: LayerCache | None,
    wanted: Wanted,
    last: int | None = None,
  ) -> Passed:
    """One run of equal layers: what its cache gets and what it tells are stacked, traces a list."""
    count = self.config.layers.runs()[index][1]
    window = None if cache is None else cache.window
    pools = () if cache is None else cache.pools

    def layer(carry: Carry, published: Published, block: Split, own: LayerCache | None):
      return nnx.merge(*block)(carry, inputs, published, own, wanted, last)

    if self.run.remat == "layer":
      layer = jax.checkpoint(layer)
    scanned = self.run.stacked and self.run.scan_layers and count > 1
    if scanned and not wanted.trace and not pools:
      graphdef, states = nnx.split(self.runs[index])

      # Only layers that publish nothing are stacked, so the scan closes over what they read.
      def step(carry: Carry, xs: tuple) -> tuple[Carry, tuple]:
        state, window = xs
        own = None if cache is None else LayerCache(window=window)
        passed = layer(carry, published, (graphdef, state), own)
        return passed.carry, (passed.kept, passed.aux)

      carry, (kept, aux) = jax.lax.scan(step, carry, (states, window))
      return Passed(carry, published, kept, aux)
    told, traces, kept_pools = [], [], []
    for i in range(count):
      ring = jax.tree.map(lambda x, i=i: x[i], window)
      own = None
      if cache is not None:
        own = LayerCache(ring, cache.partial, pools[i : i + 1])
      passed = layer(carry, published, self._split(index, i), own)
      carry, published = passed.carry, passed.published
      kept = passed.kept
      if kept is not None:
        # Pools are too large to be stacked, and there is one unfinished group at most.
        kept_pools.append(kept.pools)
        group, kept = kept.group, Kept(kept.window)
      told.append((kept, dataclasses.replace(passed.aux, trace=None)))
      traces.append(passed.aux.trace)
    kept, aux = jax.tree.map(lambda *xs: jnp.stack(xs), *told)
    if kept is not None:
      kept = Kept(kept.window, group, tuple(kept_pools) if pools else None)
    return Passed(carry, published, kept, dataclasses.replace(aux, trace=traces))

  def layer(self, index: int) -> Block:
    """Layer `index` of the schedule as a module of its own."""
    first = next(f for f, count in self.config.layers.runs() if f <= index < f + count)
    run = next(i for i, (f, _) in enumerate(self.config.layers.runs()) if f == first)
    return nnx.merge(*self._split(run, index - first))

  def _split(self, run: int, at: int) -> Split:
    """Graph and arrays of one layer of a run."""
    if not self.run.stacked:
      return nnx.split(self.runs[run][at])
    graphdef, states = nnx.split(self.runs[run])
    return graphdef, jax.tree.map(lambda x: x[at], states)

  def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Float32 logits of final states."""
    return einsum("...d,vd->...v", x, self.head.weight[...].astype(x.dtype))

  def draft(self, cache: Cache, anchor_B: Int[Array, "B"]) -> Drafted:
    """Drafts what follows the anchor, the token after those in the cache; see `draft`."""
    c, B = self.config, anchor_B.shape[0]
    if not c.draft_layers:
      raise ValueError("draft: the model has no draft layers (model.draft_layers is 0)")
    if len(cache.length_B) != B:
      raise ValueError(f"draft: {B} anchors for a cache of {len(cache.length_B)} sequences")
    noise = jnp.full((B, c.draft_block - 1), c.draft_noise_id, jnp.int32)
    tokens_BxN = jnp.concatenate([anchor_B[:, None], noise], axis=1)
    carry = Carry(*streams.begin(self._embed(Batch.of(tokens_BxN)), c.streams))
    carry, stale_B = self.drafts.run_block(cache.drafts, carry, cache.length_B)
    x_BxNxD = self._fold(carry)
    logits = self.logits(self.drafts.norm(x_BxNxD))
    return Drafted(*self.drafts.decide(x_BxNxD, logits, anchor_B), stale_B | cache.error_B)

  def inputs(self, batch: Batch, cache: Cache | None = None) -> Inputs:
    """What all layers read: the batch and, with Engram, compressed ids (-1 on images)."""
    if not self.config.engram_layers:
      return Inputs(batch, None)
    token_map = self.token_map[...]
    compressed = jnp.where(batch.is_image_BxS, -1, token_map[batch.tokens_BxS])
    history = None if cache is None else cache.history_BxL
    return Inputs(batch, Ids(compressed, token_map[self.config.engram_pad_id], history))

  def encode_image(
    self, patches_Nx3xPxP: Float[Array, "N 3 P P"], grid: Grid
  ) -> Float[Array, "n D"]:
    """Features of the image tokens of one image; see `vision.encode_image`."""
    if not self.config.vision_layers:
      raise ValueError("encode_image: the model has no vision (model.vision_layers is 0)")
    return self.aligner(self.vision(patches_Nx3xPxP, grid), grid)

  def _embed(self, batch: Batch) -> Float[Array, "B S D"]:
    x_BxSxD = self.embed.weight[...].astype(self.run.dtype)[batch.tokens_BxS]
    if batch.token_types_BxS is None:
      if batch.images_BxNxD is not None:
        raise ValueError("batch: has images_BxNxD but no token_types_BxS to say where they stand")
      return x_BxSxD
    if not self.config.vision_layers:
      raise ValueError(
        "batch: has token types, but the model has no vision (model.vision_layers 0)"
      )
    images_BxNxD = batch.images_BxNxD
    if images_BxNxD is None:
      images_BxNxD = x_BxSxD[:, :0]
    return self.image.insert(x_BxSxD, batch.token_types_BxS, images_BxNxD)

  def _pending(
    self,
    batch: Batch,
    ids: Ids | None,
    aux: LayerAux,
    runs: list[Passed],
    main_BxNxTD: Float[Array, "B N TD"] | None,
    kept_tokens: int | None,
  ) -> Pending:
    """What remains to be written after a call."""
    kept_tokens = kept_tokens or batch.tokens_BxS.shape[1]
    keys = None
    if main_BxNxTD is not None:
      N = min(kept_tokens, main_BxNxTD.shape[1])
      if main_BxNxTD.shape[1] > N:
        main_BxNxTD = batch.tail(main_BxNxTD, N)
      first_B = batch.length_B + jnp.maximum(batch.count_B - N, 0)
      keys = self.drafts.keys(main_BxNxTD, first_B[:, None] + jnp.arange(N))
    return Pending(
      windows=tuple(run.kept.window for run in runs),
      groups=tuple(run.kept.group for run in runs),
      drafts=keys,
      ids_BxN=None if ids is None else batch.tail(ids.compressed_BxS, kept_tokens),
      count_B=batch.count_B,
      error_B=aux.stale_B.any(0) | batch.unfit_B,
    )

  def _fold(self, carry: Carry) -> Float[Array, "B S D"]:
    B, S, M, D = carry.x_BxSxMxD.shape
    if self.config.residual == "plain":
      return carry.x_BxSxMxD[:, :, 0]
    u_NxD = hc.fold(
      carry.x_BxSxMxD.reshape(B * S, M, D),
      carry.pre_BxSxM.reshape(B * S, M),
      backend=self.run.backend,
    )
    return u_NxD.reshape(B, S, D)


def _alone(cache: LayerCache) -> LayerCache:
  """The cache of the only layer of a run."""
  return dataclasses.replace(cache, window=jax.tree.map(lambda x: x[0], cache.window))


def create(
  config: Config, seed: int = 0, token_map: Int[np.ndarray, " V"] | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
  """A freshly initialised model, split once into its static graph and its arrays.

  Args:
    seed: of the parameters; the same seed gives the same parameters whatever is scanned.
    token_map: token id -> compressed id for Engram; None maps each token to itself.

  Raises:
    ConfigError: a token map that does not fit the vocabulary.
  """
  model = config.model
  if token_map is not None and model.engram_layers:
    compressed = model.engram_compressed_vocab or model.vocab_size
    if len(token_map) != model.vocab_size or not 0 <= min(token_map) <= max(token_map) < compressed:
      raise ConfigError(
        f"engram token map: maps {len(token_map)} ids to 0..{max(token_map)}; must map"
        f" model.vocab_size ({model.vocab_size}) ids below engram_compressed_vocab ({compressed})"
      )

  def build(key):
    rngs = nnx.Rngs(params=key)
    return nnx.split(Model(model, Execution.of(config.train), rngs=rngs, token_map=token_map))

  # The hardware generator compiles several times faster than the default one: every parameter
  # shape is a program of its own.
  key = jax.random.key(seed, impl="unsafe_rbg")
  graphdef = abstract(config)[0]
  return graphdef, jax.jit(lambda key: build(key)[1])(key)


def abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """The same with shapes and dtypes in place of arrays: the released model takes a second."""
  graphdef, state = _abstract(config.model, Execution.of(config.train))
  return graphdef, jax.tree.map(lambda struct: struct, state)  # a State can be written to


@functools.lru_cache(maxsize=16)
def _abstract(model: ModelConfig, run: Execution) -> tuple[nnx.GraphDef, nnx.State]:
  return nnx.split(nnx.eval_shape(lambda: Model(model, run, rngs=nnx.Rngs(params=0))))


def forward(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batch: Batch,
  cache: Cache | None = None,
  *,
  prefill: Literal["all_layers", "replay"] = "all_layers",
  more: bool = False,
  defer: bool = False,
  logits_at: Int[Array, "B N"] | None = None,
  all_positions: bool = False,
  capture: bool = False,
) -> Output:
  """The model as a pure function, to be compiled over (static graphdef, state, batch, cache).

  A whole prompt, a chunk of one and a single token are the same call; with a cache each row
  continues its sequence, and the result equals that of one call over all its tokens.

  Args:
    prefill: see `Call`; so `more`, `defer` and `capture`. "replay" is an approximation.
    logits_at: row offsets whose logits are wanted; None: each row's last valid token.
    all_positions: all of them (S x V floats: for tests and small models).

  Raises:
    ValueError: a batch that does not fit the model or the cache, or "replay" with a schedule that
      cannot, with the reason.
  """
  call = Call(prefill, more, defer, capture)
  if call.replays and (all_positions or logits_at is not None):
    raise ValueError("forward: prefill='replay' gives the logits of each row's last token only")
  model = nnx.merge(graphdef, state)
  hidden = model.hidden(batch, cache, call)
  x_BxSxD = hidden.x_BxSxD
  if call.replays and more:
    x_BxSxD = x_BxSxD[:, :0]
  elif not all_positions:
    if logits_at is None:
      offsets = jnp.arange(x_BxSxD.shape[1])
      logits_at = jnp.where(hidden.batch.valid_BxS, offsets, 0).max(1, keepdims=True)
    x_BxSxD = jnp.take_along_axis(x_BxSxD, logits_at[..., None], axis=1)
  logits = model.logits(x_BxSxD)
  return Output(logits, hidden.cache, hidden.pending, hidden.aux, hidden.main_BxSxTD)


def draft(
  graphdef: nnx.GraphDef, state: nnx.State, cache: Cache, anchor_B: Int[Array, "B"]
) -> Drafted:
  """Greedy drafts of the tokens behind the anchor, which itself follows the tokens in the cache.

  `forward` has filled the draft layers' rings; nothing is written here.

  Source: arXiv 2609.19969, section 3 (DSpark).
  """
  return nnx.merge(graphdef, state).draft(cache, anchor_B)
