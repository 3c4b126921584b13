"""What is asked of generation, and what comes back."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from hysparse.config import ModelConfig
from hysparse.inference.sampling import Sampling

GREEDY = Sampling()


class RequestError(ValueError):
  """A request that cannot be served; one line."""


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt to continue.

  Attributes:
    prompt: token ids, at least one.
    max_new: tokens to add, at most.
    sampling: how they are drawn; greedy by default.
    stops: token ids that end the text; the one that does is the last token of the result.
  """

  prompt: Sequence[int]
  max_new: int
  sampling: Sampling = GREEDY
  stops: tuple[int, ...] = ()

  def check(self, config: ModelConfig, max_tokens: int) -> Int[np.ndarray, " S"]:
    """The prompt as an array.

    Raises:
      RequestError: naming what does not fit.
    """
    if isinstance(self.prompt, str):
      raise RequestError("prompt: is a text; must be token ids (encode it with a tokenizer)")
    if not _is_integer(self.max_new):
      raise RequestError(f"max_new: is {self.max_new!r}; must be an integer")
    if not isinstance(self.stops, tuple) or not all(map(_is_integer, self.stops)):
      raise RequestError(f"stops: is {self.stops!r}; must be a tuple of token ids")
    if not isinstance(self.sampling, Sampling):
      raise RequestError(f"sampling: is {self.sampling!r}; must be a Sampling")
    try:
      prompt = np.asarray(self.prompt)
    except (ValueError, OverflowError) as error:
      raise RequestError(f"prompt: is no list of token ids: {error}") from None
    if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
      raise RequestError(
        f"prompt: has shape {prompt.shape} and dtype {prompt.dtype}; must be at least one token id"
      )
    for name, ids in (("prompt", prompt.tolist()), ("stops", self.stops)):
      wrong = [x for x in ids if not 0 <= x < config.vocab_size]
      if wrong:
        raise RequestError(
          f"{name}: token {wrong[0]} is not in 0..vocab_size-1 ({config.vocab_size - 1})"
        )
    if self.max_new < 1:
      raise RequestError(f"max_new: is {self.max_new}; must be at least 1")
    if len(prompt) + self.max_new > max_tokens:
      raise RequestError(
        f"prompt: its {len(prompt)} tokens and {self.max_new} new ones (max_new) are more than the"
        f" {max_tokens} that a sequence has room for"
      )
    return prompt.astype(np.int32)


def _is_integer(value: Any) -> bool:
  """Python's and NumPy's integers, and no booleans."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Finished:
  """A continued prompt.

  Attributes:
    tokens: the new ones.
    reason: "stop" if a stop token came, "length" if `max_new` did.
  """

  tokens: Int[np.ndarray, " N"]
  reason: Literal["stop", "length"]
