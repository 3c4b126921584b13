"""A small model to generate with, and what the cache-free model says of generated tokens.

Compiling takes most of the time, so tests share this model and a few engine sizes: seeds, settings
and weights are arrays, and change no program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import small

from hysparse.config import Config
from hysparse.inference import sampling
from hysparse.inference.engine import Engine
from hysparse.inference.requests import Request
from hysparse.inference.sampling import Sampling, SamplingBatch
from hysparse.nn.batch import Batch
from hysparse.nn.model import forward

LENGTH = 96  # tokens of a sequence, at most
# Logits closer than this may change places when sums are rounded otherwise: 20 times the largest
# difference seen between a call with a cache and one without, relative to logits of about 5.
MARGIN = 1e-4

# In two layers: n-gram history, unfinished groups, a selection, drafts, and fewer experts for
# tokens of prompts than for generated ones.
CFG = small.config(
  "full/2 reuse",
  vocab_size=16,
  residual="plain",
  engram_layers=(1,),
  experts_per_prompt_token=1,
  draft_layers=1,
  draft_block=3,
  draft_noise_id=5,
  draft_target_layers=(0, 1),
  draft_markov_rank=16,
)
SEED = 3  # of the weights: its greedy texts do not go in circles
SIZES = {"slots": 2, "max_tokens": LENGTH, "segment": 8, "chunk": 16}


@functools.cache
def engine(cfg: Config = CFG, seed: int = SEED, **options) -> Engine:
  return Engine(*small.model(cfg, seed), cfg, **(SIZES | options))


def requests(
  lengths: Sequence[int], max_new: Sequence[int], *choices: Sampling, cfg: Config = CFG
) -> list[Request]:
  """Random prompts; settings are dealt out in turn."""
  rng = np.random.default_rng(0)
  choices = choices or (sampling.Sampling(),)
  return [
    Request(rng.integers(0, cfg.model.vocab_size, n).tolist(), new, choices[i % len(choices)])
    for i, (n, new) in enumerate(zip(lengths, max_new, strict=True))
  ]


def served(engine: Engine, asked: Sequence[Request], **options) -> list[list[int]]:
  """The tokens of each request."""
  results = dict(engine.run(asked, **options))
  return [results[number].tokens.tolist() for number in range(len(asked))]


@functools.partial(jax.jit, static_argnums=0)
def _seen(graphdef, state, batch: Batch, choice: SamplingBatch) -> tuple[jax.Array, jax.Array]:
  """Logits [S, V] of a row without a cache, and the token that each of them draws, [S]."""
  logits_SxV = forward(graphdef, state, batch, all_positions=True).logits_BxNxV[0]
  every = jax.tree.map(lambda x: jnp.repeat(x, LENGTH), choice)
  following = sampling.keys(every.seed_B, jnp.arange(LENGTH) + 1)
  return logits_SxV, sampling.sample(following, sampling.distribution(logits_SxV, every))


def seen(
  request: Request,
  tokens: Sequence[int],
  cfg: Config = CFG,
  seed: int = SEED,
  *,
  prompt: bool = True,
) -> tuple[np.ndarray, list[int]]:
  """What one call without a cache over all tokens has for each generated one.

  Args:
    prompt: whether the prompt's tokens count as such.

  Returns:
    [N, V] logits, and the tokens that they draw.
  """
  row = np.concatenate([request.prompt, tokens]).astype(np.int32)
  padded = np.pad(row, (0, LENGTH - len(row)))[None]
  batch = Batch.of(jnp.asarray(padded), jnp.asarray([len(row)]))
  is_prompt = (np.arange(LENGTH) < len(request.prompt))[None] & prompt
  batch = dataclasses.replace(batch, is_prompt_BxS=jnp.asarray(is_prompt))
  logits, drawn = _seen(*small.model(cfg, seed), batch, SamplingBatch.of([request.sampling]))
  generated = slice(len(request.prompt) - 1, len(row) - 1)
  return np.asarray(logits)[generated], drawn[generated].tolist()


def check_greedy(
  request: Request, tokens: Sequence[int], cfg: Config = CFG, seed: int = SEED
) -> None:
  """Every token is the likeliest one by a margin that rounding cannot bridge."""
  logits, _ = seen(request, tokens, cfg, seed)
  least, most = np.sort(logits, axis=1)[:, -2:].T
  assert (most - least).min() > MARGIN, "take another seed: what is the likeliest is not defined"
  assert logits.argmax(1).tolist() == list(tokens)


def check_drawn(
  request: Request, tokens: Sequence[int], cfg: Config = CFG, seed: int = SEED
) -> None:
  """Every token is the one that its seed and position draw from the cache-free logits.

  Rounding moves the bounds between tokens by about 1e-6 of the unit that a random number is drawn
  from: a hundred tokens differ once in 10,000 seeds. The seeds here are fixed.
  """
  assert seen(request, tokens, cfg, seed)[1] == list(tokens)
