"""A model and a prompt, as a notebook gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from flax import nnx

from hysparse.config import Config, ConfigError

if TYPE_CHECKING:
  from hysparse.conversion.load import Loaded
  from hysparse.tokenizer import Tokenizer

_SHORTEST = 256  # tokens that a prompt is padded to at least, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A model and what it is asked: `count` tokens, padded to one of few lengths."""

  config: Config
  graphdef: nnx.GraphDef
  state: nnx.State
  tokenizer: Tokenizer | None
  padded_S: np.ndarray
  count: int


def prompt_of(
  model: Loaded | tuple[Config, nnx.GraphDef, nnx.State], prompt: str | Sequence[int]
) -> Prompt:
  """
  Args:
    model: what `hysparse.load` returns, or (config, graphdef, state).
    prompt: token ids, or text if the model has a tokenizer.

  Raises:
    ConfigError: a prompt that is empty, too long, or no ids of the model.
  """
  tokenizer = None
  if isinstance(model, tuple):
    config, graphdef, state = model
  else:
    config, graphdef, state, tokenizer = model.config, model.graphdef, model.state, model.tokenizer
  if isinstance(prompt, str):
    if tokenizer is None:
      raise ConfigError("prompt: is text, but the model has no tokenizer; give token ids")
    prompt = tokenizer.encode(prompt)
  tokens_S = np.asarray(prompt, np.int32)
  c, count = config.model, len(tokens_S)
  if tokens_S.ndim != 1 or not 1 <= count <= c.max_positions:
    raise ConfigError(
      f"prompt: has shape {tokens_S.shape}; must be 1 to {c.max_positions} token ids in a row"
    )
  if tokens_S.min() < 0 or tokens_S.max() >= c.vocab_size:
    raise ConfigError(
      f"prompt: has ids {tokens_S.min()}..{tokens_S.max()}; must be in 0..{c.vocab_size - 1}"
    )
  padded = _SHORTEST
  while padded < count:
    padded *= 2
  padded = min(-(-padded // c.alignment) * c.alignment, c.max_positions)
  padded_S = np.pad(tokens_S, (0, padded - count))
  return Prompt(config, graphdef, state, tokenizer, padded_S, count)
