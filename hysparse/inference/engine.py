"""Continuous batching: requests in a fixed number of slots of one paged cache.

    engine = Engine(graphdef, state, config, slots=8, max_tokens=4096)
    for finished in engine.run([Request(prompt, max_new=100), ...]):
      ...

The host admits a request when a slot and blocks for all of its tokens are free, runs its prompt in
chunks, and lets all slots decode in compiled segments; a finished sequence gives its blocks back.
Tokens do not depend on what else is in the batch, nor on how prompts and segments are cut, except
for the rounding of sums (and for `prefill="replay"`, which is an approximation by itself).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.arguments import whole

from hysparse.cache import layout
from hysparse.cache.allocate import allocate
from hysparse.cache.blocks import BlockPool, OutOfBlocks, clear
from hysparse.cache.state import Cache, CacheError
from hysparse.config import Config
from hysparse.inference import plan, segments
from hysparse.inference import speculate as speculate_lib
from hysparse.inference.requests import Finished, Request, RequestError
from hysparse.inference.sampling import Sampling, SamplingBatch
from hysparse.inference.segments import NO_TOKEN, Slots
from hysparse.nn.unstack import unstack
from hysparse.sharding import Placement

MAX_TOKENS = 4096  # of a sequence, unless told otherwise

OnTokens = Callable[[int, list[int]], None]  # (number of the request, its next tokens)


@dataclasses.dataclass
class _Running:
  """A request in a slot."""

  number: int
  request: Request
  tokens: list[int]
  length: int  # tokens that the cache holds

  @property
  def left(self) -> int:
    return self.request.max_new - len(self.tokens)

  @property
  def reason(self) -> Literal["stop", "length"] | None:
    if self.tokens and self.tokens[-1] in self.request.stops:
      return "stop"
    return "length" if self.left <= 0 else None


class Engine:
  """Serves requests with one model.

  Lengths are rounded up to one of few, so whatever prompts come, few programs are compiled: one for
  each width of a prompt's first piece (16, 32, ... chunk), one for each length of the cache beyond
  a chunk and, for decoding, one for each length at all (128, 256, ... max_tokens). With chunks of
  128 tokens and 512 tokens at most these are 4 + 2 + 3 = 9. Under replay the pieces that are not a
  prompt's last take programs of their own.
  """

  def __init__(
    self,
    graphdef: nnx.GraphDef,
    state: nnx.State,
    config: Config,
    *,
    slots: int = 8,
    max_tokens: int | None = None,
    pool_tokens: int | None = None,
    block_tokens: int | None = None,
    segment: int = 16,
    chunk: int = 512,
    prefill: Literal["all_layers", "replay"] = "all_layers",
    speculate: bool = False,
    min_acceptance: float = 0.3,
    separate_experts: bool = False,
    placement: Placement | None = None,
  ):
    """
    Args:
      config: of the model; `train.numerics` decides what the cache holds.
      slots: sequences that decode at once.
      max_tokens: of one sequence, prompt and new ones; None: 4,096, or all positions if fewer.
      pool_tokens: tokens that all sequences together have blocks for; None: enough for all slots.
      block_tokens: see `layout.layout`.
      segment: decode steps between two looks of the host.
      chunk: prompt tokens in one call.
      prefill: see `nn.calls.Call`.
      speculate: let the draft layers guess ahead; the tokens are the model's own all the same.
      min_acceptance: see `speculate.speculate`.
      separate_experts: for long generation on the CPU: faster steps (docs/inference.md), slower to
        compile.
      placement: spreads the slots, the pools and Engram tables over several devices.

    Raises:
      CacheError: a cache that cannot be, slots that cannot be spread evenly.
      ValueError: a value outside its range, replay with a schedule that cannot, drafts of a model
        without draft layers or longer than its window.
    """
    for name, value in (("slots", slots), ("segment", segment), ("chunk", chunk)):
      whole(name, value)
    for name, value in (("max_tokens", max_tokens), ("pool_tokens", pool_tokens)):
      if value is not None:
        whole(name, value)
    if placement is not None and not isinstance(placement, Placement):
      raise TypeError(f"placement: is a {type(placement).__name__}; must be a hysparse.Placement")
    if placement is not None and slots % placement.parts("batch"):
      raise CacheError(
        f"slots: is {slots}; must be a multiple of the {placement.parts('batch')} devices that"
        " share them"
      )
    if prefill not in ("all_layers", "replay"):
      raise ValueError(f"prefill: is {prefill!r}; must be 'all_layers' or 'replay'")
    if not 0 <= min_acceptance <= 1:
      raise ValueError(f"min_acceptance: is {min_acceptance}; must be a number from 0 to 1")
    model = config.model
    reason = model.layers.replay_unsupported_reason() if prefill == "replay" else None
    if reason:
      raise ValueError(f"prefill: 'replay' cannot be used: {reason}")
    if speculate and not model.draft_layers:
      raise ValueError("speculate: the model has no draft layers (model.draft_layers is 0)")
    if speculate and model.draft_block + 1 > layout.kept_tokens(model):
      raise ValueError(
        f"speculate: a block of {model.draft_block} drafts and the token before it reach further"
        f" than the cache can take back ({layout.kept_tokens(model)} tokens)"
      )
    self.config, self._speculate, self._min_acceptance = config, speculate, min_acceptance
    self._prefill, self._segment = prefill, segment
    self._chunk = max(chunk, model.window) if prefill == "replay" else chunk
    self.max_tokens = min(MAX_TOKENS, model.max_positions) if max_tokens is None else max_tokens
    if pool_tokens is None:
      P = layout.layout(model, block_tokens=block_tokens).block_tokens
      pool_tokens = slots * -(-self.max_tokens // P) * P
    self._allocate = functools.partial(
      allocate, config, slots, self.max_tokens,
      pool_tokens=pool_tokens, block_tokens=block_tokens, placement=placement,
    )  # fmt: skip
    self._cache = self._allocate()
    self.graphdef, state = unstack(  # after all that may be refused
      graphdef, state, separate_experts=separate_experts
    )
    self.state = state if placement is None else placement.place(state)
    # What a call returns goes back to its place: compiled functions depend on where arrays live.
    self._places = None
    if placement is not None:
      self._places = jax.tree.map(lambda x: x.sharding, self._cache)
    self._pool = BlockPool(self._cache)
    self._running: dict[int, _Running] = {}
    self._at_work = False
    self._stops = 1  # places for stop tokens in the compiled programs
    self.programs: set[tuple] = set()  # what had to be compiled, by its sizes
    self.decoded = self.calls = 0  # tokens behind prompts, and calls of the model for them

  def run(
    self, requests: Iterable[Request], on_tokens: OnTokens | None = None
  ) -> Iterator[tuple[int, Finished]]:
    """Serves requests and yields (number of the request, result) as they finish.

    Args:
      on_tokens: called with the new tokens of a request after its prompt and each segment.

    Raises:
      RequestError: a request that does not fit, before anything is computed.
      OutOfBlocks: a request that needs more blocks than the pool has.
      CacheError: the model gave logits that are not numbers, or the cache lost track.
      RuntimeError: another run of this engine is neither at its end nor closed.
    """
    if self._at_work:
      raise RuntimeError("run: the engine is at work on other requests; finish or close that run")
    if isinstance(requests, Request):
      raise RequestError("requests: is one request; must be a list of them")
    waiting: collections.deque[tuple[int, Request, np.ndarray]] = collections.deque()
    for number, request in enumerate(requests):
      if not isinstance(request, Request):
        raise RequestError(f"request {number}: is a {type(request).__name__}; must be a Request")
      try:
        prompt = request.check(self.config.model, self.max_tokens)
        self._pool.check(len(prompt) + request.max_new)
        waiting.append((number, request, prompt))
      except (RequestError, OutOfBlocks) as error:
        raise type(error)(f"request {number}: {error}") from None
    self._stops = max([self._stops, *(len(request.stops) for _, request, _ in waiting)])
    tell = on_tokens or (lambda number, tokens: None)
    self._at_work = True
    try:
      while waiting or self._running:
        while waiting and self._admit(*waiting[0], tell):
          waiting.popleft()
          yield from self._retired()
        if self._running:
          self._decode(tell)
          yield from self._retired()
    except BaseException as error:
      # An interrupted call has used up the cache that it was given.
      used_up = any(x.is_deleted() for x in jax.tree.leaves(self._cache))
      if used_up or isinstance(error, CacheError):
        self._cache = None
        self._cache = self._allocate()
      raise
    finally:
      self._at_work = False
      for slot in list(self._running):
        self._release(slot)

  def _admit(self, number: int, request: Request, prompt: np.ndarray, tell: OnTokens) -> bool:
    """Runs the prompt of a request in a free slot, if there is one and blocks for all of it."""
    free = [slot for slot in range(self._pool.slots) if slot not in self._running]
    tokens = len(prompt) + request.max_new
    if not free or self._pool.missing(free[0], tokens) > self._pool.free:
      return False  # what runs will give some back
    slot = free[0]
    self._pool.reserve(slot, tokens)
    running = self._running[slot] = _Running(number, request, [], 0)
    slots = jnp.asarray([slot], jnp.int32)
    self._cache = clear(self._kept(self._cache), slots)
    for piece in plan.chunks(len(prompt), self._chunk):
      row = np.zeros((1, piece.width), np.int32)
      row[0, : piece.count] = prompt[piece.start : piece.start + piece.count]
      cache, width = self._within(piece.start + piece.count)
      replay = self._prefill == "replay"
      options = {"prefill": self._prefill, "more": piece.more and replay}
      self.programs.add(("prefill", piece.width, width, options["more"]))
      cache, token_N, bad_N = segments.prefill_chunk(
        self.graphdef, self.state, cache, slots, jnp.asarray(row),
        jnp.asarray([piece.count], jnp.int32), SamplingBatch.of([request.sampling]), **options,
      )  # fmt: skip
      self._cache = self._kept(cache)
    running.length = len(prompt)
    self._check(slot, bool(bad_N[0]), int(self._cache.error_B[slot]))
    self._say(running, [int(token_N[0])], tell)
    return True

  def _decode(self, tell: OnTokens) -> None:
    """One segment of all slots."""
    ahead = self._segment * (self.config.model.draft_block + 1 if self._speculate else 1)
    cache, width = self._within(max(r.length + min(ahead, r.left) for r in self._running.values()))
    self.programs.add(("decode", self._segment, width, self._stops))
    args = (self.graphdef, self.state, cache, self._slots())
    if self._speculate:
      cache, slots, out_BxN, calls_B = speculate_lib.speculate(
        *args, steps=self._segment, min_acceptance=self._min_acceptance
      )
    else:
      cache, slots, out_BxN = segments.decode(*args, steps=self._segment)
      calls_B = (out_BxN != NO_TOKEN).sum(1)
    self._cache = self._kept(cache)
    out_BxN, bad_B, error_B, calls_B = jax.device_get(
      (out_BxN, slots.bad_B, cache.error_B, calls_B)
    )
    self.decoded += int((out_BxN != NO_TOKEN).sum())
    self.calls += int(calls_B.sum())
    for slot, running in self._running.items():
      tokens = out_BxN[slot][out_BxN[slot] != NO_TOKEN].tolist()
      running.length += len(tokens)
      self._check(slot, bad_B[slot], error_B[slot])
      self._say(running, tokens, tell)

  def _slots(self) -> Slots:
    """The slots as the next segment finds them."""
    B = self._pool.slots
    token_B, left_B = np.zeros(B, np.int32), np.zeros(B, np.int32)
    stops_BxE = np.full((B, self._stops), NO_TOKEN, np.int32)
    choice = [Sampling()] * B
    for slot, running in self._running.items():
      token_B[slot], left_B[slot] = running.tokens[-1], running.left
      stops_BxE[slot, : len(running.request.stops)] = running.request.stops
      choice[slot] = running.request.sampling
    arrays = map(jnp.asarray, (token_B, left_B, stops_BxE))
    return Slots(*arrays, SamplingBatch.of(choice), jnp.zeros(B, bool))

  def _kept(self, cache: Cache) -> Cache:
    """What a call returned, with the whole table and in its place."""
    cache = self._pool.install(cache)
    return cache if self._places is None else jax.device_put(cache, self._places)

  def _within(self, tokens: int) -> tuple[Cache, int]:
    """The cache with a table that holds `tokens` tokens and is one of few lengths; that length."""
    block = self._cache.pages.tokens
    width = plan.bucket(-(-tokens // block), 1, self._pool.width) * block
    return self._cache.within(width), width

  def _say(self, running: _Running, tokens: list[int], tell: OnTokens) -> None:
    running.tokens += tokens
    if tokens:
      tell(running.number, tokens)

  def _retired(self) -> Iterator[tuple[int, Finished]]:
    for slot, running in list(self._running.items()):
      if running.reason:
        self._release(slot)
        yield running.number, Finished(np.asarray(running.tokens, np.int32), running.reason)

  def _release(self, slot: int) -> None:
    del self._running[slot]
    self._pool.release(slot)

  def _check(self, slot: int, bad: bool, error: bool) -> None:
    running = self._running[slot]
    number = running.number
    if bad:
      # The newest token, if there is one already, is not in the cache.
      seen = running.length + bool(running.tokens)
      raise CacheError(
        f"request {number}: the model gave logits that are not numbers after {seen} tokens"
      )
    if error:
      raise CacheError(
        f"request {number}: the cache holds rows that are not the sequence's, or outgrew its blocks"
      )
