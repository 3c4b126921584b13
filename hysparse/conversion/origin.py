"""What an export follows: the small files, the index and the tensors of where a model came from.

A released folder has all of it; a workdir that was converted from one keeps the small files.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

from hysparse import published
from hysparse import tokenizer as tokenizer_lib
from hysparse.config import ConfigError, ModelConfig
from hysparse.conversion import shards as shards_lib
from hysparse.conversion.folder import CONFIG, TOKEN_MAP, Folder, read_config
from hysparse.conversion.shard_writer import SHARD_BYTES, Entry, in_shards
from hysparse.conversion.shards import INDEX, SINGLE, FolderError, Stored, released_name

# What belongs to a model besides its tensors. The first three are made anew where they must be.
SMALL_FILES = (
  CONFIG,
  INDEX,
  TOKEN_MAP,
  tokenizer_lib.FILE_NAME,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "generation_config.json",
  "preprocessor_config.json",
  "processor_config.json",
  "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a model came from, as far as an export can follow it.

  Attributes:
    path: the folder of the small files.
    index: the file of each tensor, by the spelling of its name there; empty if not known.
    dtypes: of tensors, by released name, where they are not what the table of tensors.py says.
    tensors: those whose bytes can be had, by released name.
  """

  path: pathlib.Path
  index: Mapping[str, str]
  dtypes: Mapping[str, str]
  tensors: Mapping[str, Stored]

  @classmethod
  def of_folder(cls, folder: Folder) -> Origin:
    shards = folder.shards
    dtypes = {name: stored.dtype for name, stored in shards.tensors.items()}
    return cls(folder.path, shards.index, dtypes, shards.tensors)

  @classmethod
  def kept(cls, path: pathlib.Path, dtypes: Mapping[str, str]) -> Origin:
    """Of small files only; without an index a release is one file.

    Raises:
      FolderError: an index that cannot be read.
    """
    try:
      index = shards_lib.read_index(path / INDEX) if (path / INDEX).exists() else {}
    except ValueError as error:
      raise FolderError(path, [str(error)]) from None
    return cls(path, index, dtypes, {})

  def layout(
    self, entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES
  ) -> tuple[dict[str, str], dict[str, str]]:
    """How the tensors are spelled, and the file of each spelled name.

    As in this folder if it has them all, else in the released spelling and in files of our own.
    """
    spelled = {released_name(name): name for name in self.index}
    if entries.keys() <= spelled.keys():
      names = {name: spelled[name] for name in entries}
      return names, {name: self.index[name] for name in names.values()}
    names = {name: name for name in entries}
    if not self.index and (self.path / CONFIG).exists():
      return names, dict.fromkeys(entries, SINGLE)
    return names, in_shards(entries, shard_bytes)

  def config_bytes(self, config: ModelConfig) -> bytes | None:
    """Its config.json, if that describes this model."""
    try:
      theirs = published.from_published(read_config(self.path))
      same = as_read(theirs) == as_read(config)
    except (ValueError, ConfigError):
      return None
    return (self.path / CONFIG).read_bytes() if same else None


def copy_small_files(source: pathlib.Path, target: pathlib.Path) -> list[str]:
  """Copies what there is of `SMALL_FILES`, returns the names."""
  target.mkdir(exist_ok=True)
  names = [name for name in SMALL_FILES if (source / name).is_file()]
  for name in names:
    shutil.copyfile(source / name, target / name)
  return names


def as_read(config: ModelConfig) -> ModelConfig:
  """What a reader of this model's config.json takes it for; equal for what is the same there.

  Raises:
    ConfigError: what has no published form.
  """
  return published.from_published(published.to_published(config))
