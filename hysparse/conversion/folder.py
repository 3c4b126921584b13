"""A released folder, checked whole before any of its data is read.

    config.json, model.safetensors.index.json and its shards (or one model.safetensors),
    engram_token_map.npy or tokenizer.json if the model has Engram

Everything wrong with a folder is told at once: its config, its files and headers, and where they
differ from the table of `tensors.py`. A weight and its scale may lie in different files.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from hysparse import json_text, published
from hysparse import tokenizer as tokenizer_lib
from hysparse.config import ConfigError, ModelConfig
from hysparse.conversion import shards as shards_lib
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.shards import FolderError, Shards, shortened
from hysparse.tokenizer import TokenizerError

CONFIG = "config.json"
TOKEN_MAP = "engram_token_map.npy"


@dataclasses.dataclass(frozen=True)
class Folder:
  """A folder without problems.

  Attributes:
    path: of it.
    config: the model.
    values: the contents of config.json.
    shards: its tensors.
    token_map: token id -> compressed id, if the model has Engram.
  """

  path: pathlib.Path
  config: ModelConfig
  values: Mapping[str, Any]
  shards: Shards
  token_map: Int32[np.ndarray, " V"] | None


def open_folder(path: pathlib.Path | str) -> Folder:
  """Reads the config and the headers of a released folder and checks them.

  Raises:
    FolderError: all problems, a line each.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise FolderError(path, ["is no folder" if path.exists() else "does not exist"])
  shards = Shards(path)
  problems = list(shards.problems)
  values = config = token_map = None
  try:
    values = read_config(path)
    config = published.from_published(values, name=CONFIG)
    table = list(tensors_lib.tensors(config))
  except (ValueError, ConfigError) as error:
    problems.insert(0, str(error))
  else:
    if shards.tensors or shards.lost:
      problems += _differences(table, shards)
    rows = published.engram_rows_problem(values, config)
    problems += [f"{CONFIG}: {rows}"] if rows else []
    if config.engram_layers:
      try:
        token_map = read_token_map(path, config)
      except ValueError as error:
        problems.append(str(error))
  if problems:
    raise FolderError(path, problems)
  return Folder(path, config, values, shards, token_map)


def read_config(path: pathlib.Path) -> Any:
  """The contents of a folder's config.json.

  Raises:
    ValueError: it is missing or broken; without the folder.
  """
  try:
    return json_text.parse((path / CONFIG).read_bytes())
  except FileNotFoundError:
    raise ValueError(f"{CONFIG}: is missing") from None
  except OSError as error:
    raise ValueError(f"{CONFIG}: cannot be read: {error.strerror}") from None
  except ValueError as error:
    raise ValueError(f"{CONFIG}: is not JSON: {error}") from None


def read_token_map(path: pathlib.Path, config: ModelConfig) -> Int32[np.ndarray, " V"]:
  """The Engram id map that lies in a folder, else the one that its tokenizer gives.

  Ids that the tokenizer does not have are never met; they map to 0.

  Raises:
    ValueError: neither file, or a map that does not fit the model; without the folder.
  """
  if (path / TOKEN_MAP).exists():
    name = TOKEN_MAP
    try:
      found = np.load(path / name, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
      raise ValueError(f"{name}: cannot be read: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
      raise ValueError(f"{name}: must be a vector of whole numbers")
    if len(found) != config.vocab_size:
      raise ValueError(f"{name}: maps {len(found)} ids; vocab_size is {config.vocab_size}")
  elif (path / tokenizer_lib.FILE_NAME).exists():
    name = tokenizer_lib.FILE_NAME
    try:
      tokenizer = tokenizer_lib.load(path / name)
      found = tokenizer_lib.engram_token_map(tokenizer)
    except TokenizerError as error:
      raise ValueError(str(error).removeprefix(f"{path}/")) from None
    if len(found) > config.vocab_size:
      raise ValueError(f"{name}: has {len(found)} ids; vocab_size is {config.vocab_size}")
    found = np.pad(found, (0, config.vocab_size - len(found)))
  else:
    raise ValueError(
      f"neither {TOKEN_MAP} nor {tokenizer_lib.FILE_NAME}: Engram layers need one of them"
    )
  ids = config.engram_compressed_vocab or config.vocab_size
  if not 0 <= found.min() <= found.max() < ids:
    raise ValueError(
      f"{name}: gives compressed ids {found.min()}..{found.max()}; engram_compressed_vocab_size is"
      f" {ids}"
    )
  return found.astype(np.int32)


def _differences(table: list[tensors_lib.Tensor], shards: Shards) -> Iterator[str]:
  """Lines on what the table has and the folder lacks, the reverse, and what differs."""
  wanted = {tensor.name: tensor for tensor in table}
  missing, unscaled, wrong = [], [], []
  for name, tensor in wanted.items():
    stored = shards.tensors.get(name)
    if stored is None:
      if name in shards.lost:
        continue  # told with its file
      weight = name.removesuffix("scale") + "weight"
      bare = tensor.part == "scales" and weight in shards.tensors
      (unscaled if bare else missing).append(weight if bare else name)
    elif stored.shape != tensor.shape or stored.dtype not in tensor.dtypes:
      wrong.append(f"{name} is {stored}, must be {tensor.dtype} {list(tensor.shape)}")
  extra = [
    name for name in shards.tensors if name not in wanted and not shards_lib.is_tied_copy(name)
  ]
  if missing:
    yield f"missing: {shortened(missing)}"
  if unscaled:
    yield f"without their scales: {shortened(unscaled)}"
  if extra:
    yield f"not of this model: {shortened(extra)}"
  if wrong:
    yield f"wrong shape or dtype: {shortened(wrong, '; ')}"
