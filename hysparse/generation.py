"""What scripts/generate.py calls: a model's folder and prompts in, text or token ids out."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from hysparse import json_text
from hysparse.cache.blocks import OutOfBlocks
from hysparse.cache.state import CacheError
from hysparse.checkpoints import CheckpointError
from hysparse.config import ConfigError
from hysparse.conversion.load import Loaded, Numerics, load
from hysparse.conversion.shards import FolderError
from hysparse.inference.engine import Engine
from hysparse.inference.requests import GREEDY, Request, RequestError
from hysparse.inference.sampling import Sampling
from hysparse.tokenizer import Tokenizer, TokenizerError
from hysparse.training.progress import Console
from hysparse.workdir import WorkdirError

MAX_NEW = 200
PROGRESS_S = 2.0  # seconds between two lines on several prompts


class PromptError(ValueError):
  """A prompt, or a file of them, that cannot be read; one line."""


# What goes wrong by input or disk: one line for the user, no traceback.
USER_ERRORS = (
  CacheError,
  CheckpointError,
  ConfigError,
  FolderError,
  OutOfBlocks,
  PromptError,
  RequestError,
  TokenizerError,
  WorkdirError,
)


@dataclasses.dataclass(frozen=True)
class Options:
  """How to generate; fields as the flags of scripts/generate.py."""

  max_new: int | None = None  # None: 200, or as many as there are positions for
  sampling: Sampling = GREEDY
  slots: int = 8
  pool_tokens: int | None = None
  prefill: str = "all_layers"
  speculate: bool = False
  numerics: Numerics | None = None
  stop: bool = True  # at the tokenizer's end token


def read_prompts(path: pathlib.Path) -> list[Any]:
  """Prompts of a file: of JSONL the field "prompt" (text or a list of ids), else the whole text.

  Raises:
    PromptError: naming the line.
  """
  try:
    text = path.read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    raise PromptError(f"{path}: cannot be read: {error}") from None
  if path.suffix != ".jsonl":
    return [text]
  prompts = []
  for number, line in enumerate(text.split("\n"), 1):  # not at U+2028, which JSON leaves as it is
    if not line.strip():
      continue
    try:
      record = json_text.parse(line)
    except ValueError as error:
      raise PromptError(f"{path}:{number}: is no JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str | list):
      raise PromptError(
        f'{path}:{number}: has no field "prompt" with a text or a list of token ids'
      )
    prompts.append(record["prompt"])
  return prompts


def run(
  model: pathlib.Path, prompts: Sequence[Any], options: Options, out: TextIO = sys.stdout
) -> list[dict[str, Any]]:
  """Continues prompts with the model of a workdir or a released folder.

  One prompt is written to `out` as it comes; of several only the results are returned. Progress
  goes to standard error.

  Returns:
    For each prompt "tokens", "reason" and, with a tokenizer, "text".

  Raises:
    USER_ERRORS.
  """
  if not prompts:
    raise PromptError("prompts: there are none; give --prompt, --ids or --file")
  console = Console(sys.stderr)
  console.say(f"loading {model}")
  loaded = load(model, numerics=options.numerics)
  requests = [_request(i, prompt, loaded, options) for i, prompt in enumerate(prompts)]
  for number, request in enumerate(requests):
    try:
      request.check(loaded.config.model, loaded.config.model.max_positions)
    except RequestError as error:
      raise RequestError(f"request {number}: {error}") from None
  longest = max(len(request.prompt) + request.max_new for request in requests)
  try:
    engine = Engine(
      loaded.graphdef, loaded.state, loaded.config,
      slots=min(options.slots, len(requests)), max_tokens=longest, pool_tokens=options.pool_tokens,
      prefill=options.prefill, speculate=options.speculate,
    )  # fmt: skip
  except ValueError as error:
    raise PromptError(error) from None
  console.say("compiling: the first tokens take a while")
  told = _Told(loaded.tokenizer, out if len(requests) == 1 else None, len(requests))
  results: list[dict[str, Any] | None] = [None] * len(requests)
  for number, finished in engine.run(requests, told.tokens):
    tokens = finished.tokens.tolist()
    results[number] = {"tokens": tokens, "reason": finished.reason}
    if loaded.tokenizer is not None:
      results[number]["text"] = loaded.tokenizer.decode(tokens)
    told.finished()
  told.close(engine)
  return results


def _request(number: int, prompt: Any, loaded: Loaded, options: Options) -> Request:
  tokenizer, stops = loaded.tokenizer, ()
  if isinstance(prompt, str):
    if tokenizer is None:
      raise PromptError(
        f"request {number}: is text, and the model's folder has no tokenizer.json; give token ids"
      )
    if tokenizer.vocab_size > loaded.config.model.vocab_size:
      raise PromptError(
        f"tokenizer.json: has {tokenizer.vocab_size} ids, the model"
        f" {loaded.config.model.vocab_size} (model.vocab_size)"
      )
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(prompt)])
  if tokenizer is not None and options.stop:
    stops = (tokenizer.eos_id,)
  # Each prompt has draws of its own, whatever the others are.
  seed = (options.sampling.seed + number) % 2**32
  room = loaded.config.model.max_positions - len(prompt)
  max_new = max(1, min(MAX_NEW, room)) if options.max_new is None else options.max_new
  return Request(prompt, max_new, dataclasses.replace(options.sampling, seed=seed), stops)


class _Told:
  """What a person sees while it runs."""

  def __init__(self, tokenizer: Tokenizer | None, stream: TextIO | None, requests: int):
    self._tokenizer, self._stream = tokenizer, stream
    self._console = Console(sys.stderr)
    self._requests, self._done, self._count = requests, 0, 0
    self._ids: list[int] = []
    self._shown = ""
    self._since = self._told = time.perf_counter()

  def tokens(self, number: int, tokens: list[int]) -> None:
    del number
    self._count += len(tokens)
    if self._stream is None:
      now = time.perf_counter()
      if now - self._told < PROGRESS_S:
        return
      self._told, speed = now, self._count / (now - self._since)
      self._console.progress(
        f"{self._done} of {self._requests} prompts done, {self._count:,} tokens,"
        f" {speed:,.0f} a second"
      )
      return
    self._ids += tokens
    if self._tokenizer is None:
      text = "".join(f" {token}" for token in self._ids)
    else:
      # A character may still be incomplete: it is shown when it is whole.
      text = self._tokenizer.decode(self._ids).rstrip("\ufffd")
    if text.startswith(self._shown):
      print(text[len(self._shown) :], end="", file=self._stream, flush=True)
      self._shown = text

  def finished(self) -> None:
    self._done += 1

  def close(self, engine: Engine) -> None:
    if self._stream is not None:
      print(file=self._stream, flush=True)
    self._console.close()
    seconds = time.perf_counter() - self._since
    line = f"{self._count:,} tokens in {seconds:.1f} s, compilation included"
    if engine.calls < engine.decoded:
      line += f"; {engine.decoded / engine.calls:.2f} tokens a call of the model"
    self._console.say(line)
