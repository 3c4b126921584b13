"""Continues a few prompts with one call."""

from __future__ import annotations

from collections.abc import Sequence

from flax import nnx

from hysparse.config import Config
from hysparse.inference.engine import Engine, OnTokens
from hysparse.inference.requests import Finished, Request, RequestError

MOST_SLOTS = 8


def generate(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  config: Config,
  requests: Sequence[Request],
  on_tokens: OnTokens | None = None,
  **options,
) -> list[Finished]:
  """The results of a few requests, in their order; options as of `Engine`."""
  if isinstance(requests, Request):
    raise RequestError("requests: is one request; must be a list of them")
  longest = max((len(r.prompt) + r.max_new for r in requests), default=1)
  sizes = {"slots": min(MOST_SLOTS, max(len(requests), 1)), "max_tokens": longest}
  engine = Engine(graphdef, state, config, **(sizes | options))
  results = dict(engine.run(requests, on_tokens))
  return [results[number] for number in range(len(requests))]
