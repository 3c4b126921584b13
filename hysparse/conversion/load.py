"""`hysparse.load`: a model that was trained here, converted, or released.

    loaded = hysparse.load("DeepSeek-V4.1-Flash")
    output = hysparse.forward(loaded.graphdef, loaded.state, batch)

A workdir is known by its `experiment.json`, a released folder by `architectures` in config.json.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.formats import Quantised

from hysparse import checkpoints, json_text, workdir
from hysparse import tokenizer as tokenizer_lib
from hysparse.checkpoint_arrays import StoredArrays
from hysparse.checkpoints import CheckpointError
from hysparse.config import Config, ConfigError, DataConfig, ModelConfig
from hysparse.conversion import importing, shards
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.folder import CONFIG, Folder, open_folder
from hysparse.conversion.importing import Dequantise
from hysparse.conversion.shards import FolderError
from hysparse.conversion.tensors import TILE, Leaf
from hysparse.nn.host_table import HostTable
from hysparse.nn.model import abstract
from hysparse.tokenizer import Tokenizer

# Engram tables move to the host if they would take more of the device's memory than this.
TABLE_SHARE = 0.5

Numerics = Literal["exact", "kvquant", "official"]


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model ready for `forward`.

  Attributes:
    config: of the experiment; of a released model, what its config.json says and defaults.
    graphdef, state: as `create` returns them; weights may be `Quantised`, tables `HostTable`.
    tokenizer: if there is a tokenizer.json.
  """

  config: Config
  graphdef: nnx.GraphDef
  state: nnx.State
  tokenizer: Tokenizer | None


def load(
  path: pathlib.Path | str,
  *,
  dequantise: Dequantise | None = None,
  engram: Literal["auto", "device", "host"] = "auto",
  numerics: Numerics | None = None,
  dial: Mapping[str, str] | None = None,
) -> Loaded:
  """Loads a workdir (its newest checkpoint that can be read) or a released folder.

  Args:
    path: of the folder.
    dequantise: None keeps weights as they are stored; "bf16" makes plain arrays of what is
      quantised; "f32" makes everything float32, as training keeps it. Tables on the host stay.
    engram: where quantised tables live. "host" maps them into memory from a released folder (of a
      workdir they are read into host memory) and sends the device the rows that a call looks up;
      mapped tables are not searched for NaNs. "auto" does so if they would take more than
      TABLE_SHARE of the memory of the first device.
    numerics: None means "exact" for a released model and what a workdir was made with.
    dial: other formats of what a cache holds, {"main_kv": "bf16"}; they count under numerics
      "kvquant" and "official".

  Raises:
    FolderError: the folder is neither, or all that is wrong with a released one.
    ConfigError, WorkdirError, CheckpointError: of a workdir.
    TokenizerError: a tokenizer.json that cannot be read.
  """
  for name, value, legal in (
    ("dequantise", dequantise, (None, "bf16", "f32")),
    ("engram", engram, ("auto", "device", "host")),
    ("numerics", numerics, (None, "exact", "kvquant", "official")),
  ):
    if value not in legal:
      raise ValueError(f"{name}: is {value!r}; must be one of {', '.join(map(repr, legal))}")
  path = pathlib.Path(path)
  folder = None
  if (path / workdir.EXPERIMENT).exists():
    config = _recorded_config(path)
  elif _is_released(path):
    folder = open_folder(path)
    config = experiment_of(folder.config)
  else:
    kinds = f"{workdir.EXPERIMENT} (a workdir) nor {CONFIG} with architectures (a release)"
    raise FolderError(path, [f"holds neither {kinds}" if path.is_dir() else "is no folder"])
  if numerics is not None:
    train = dataclasses.replace(config.train, numerics=numerics)
    config = dataclasses.replace(config, train=train)
  if dial:
    unknown = sorted(dial.keys() - {"main_kv", "index_k", "window_kv"})
    if unknown:
      raise ConfigError(f"dial: has '{unknown[0]}'; it has main_kv, index_k and window_kv")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **dial))
  graphdef, like = abstract(config)
  if folder is None:
    leaves = _from_workdir(path, config, like, dequantise, engram)
  else:
    leaves = _from_folder(folder, dequantise, engram)
  flat = [
    (at, variable.replace(leaves["/".join(map(str, at))]))
    for at, variable in nnx.to_flat_state(like)
  ]
  has_tokenizer = (path / tokenizer_lib.FILE_NAME).exists()
  tokenizer = tokenizer_lib.load(path) if has_tokenizer else None
  return Loaded(config, graphdef, nnx.from_flat_state(flat), tokenizer)


def experiment_of(model: ModelConfig) -> Config:
  """The config of a released model: its architecture, everything else by default.

  Raises:
    ConfigError: documents of this model start at multiples of more tokens than it has positions.
  """
  longest = min(DataConfig().seq_len, model.max_positions)
  whole = max(longest // model.alignment, 1) * model.alignment
  return Config(model, DataConfig(seq_len=whole))


def _is_released(path: pathlib.Path) -> bool:
  try:
    values = json_text.parse((path / CONFIG).read_bytes())
  except (OSError, ValueError):
    # What is wrong with it is told with the other problems of a release.
    return (path / CONFIG).exists() or (path / shards.INDEX).exists()
  return isinstance(values, Mapping) and "architectures" in values


# --- Released folders ----------------------------------------------------------------------------


def _from_folder(folder: Folder, dequantise: Dequantise | None, engram: str) -> dict[str, Any]:
  table = list(tensors_lib.leaves(folder.config))
  on_host = _tables_on_host(table, dequantise, engram)
  leaves: dict[str, Any] = {}
  for leaf in table:
    if leaf.path in on_host:
      codes, scales = (folder.shards.tensors[tensor.name].map() for tensor in leaf.tensors())
      leaves[leaf.path] = HostTable(codes, scales)
    else:
      leaves[leaf.path] = jax.device_put(importing.read_leaf(folder, leaf, dequantise))
  if folder.token_map is not None:
    leaves[importing.TOKEN_MAP] = jax.device_put(folder.token_map)
  return leaves


# --- Workdirs ------------------------------------------------------------------------------------


def _recorded_config(path: pathlib.Path) -> Config:
  try:
    return Config.from_dict(workdir.read_experiment(path)["config"])
  except ConfigError as error:
    raise ConfigError(f"{path / workdir.EXPERIMENT}: {error}") from None


def _from_workdir(
  path: pathlib.Path, config: Config, like: nnx.State, dequantise: Dequantise | None, engram: str
) -> dict[str, Any]:
  """The newest checkpoint that can be read; newer ones are passed over with a line in the log."""
  steps = checkpoints.steps_in(path)
  if not steps:
    raise CheckpointError(f"{path}: has no checkpoint yet")
  problems = []
  for step in reversed(steps):
    try:
      leaves = _stored_leaves(path, step, config, like, dequantise, engram)
    except CheckpointError as error:
      problems.append(str(error))
    else:
      for problem in problems:
        logging.warning("%s; loading checkpoint %d instead", problem, step)
      return leaves
  raise CheckpointError("; ".join(problems))


def _stored_leaves(
  path: pathlib.Path,
  step: int,
  config: Config,
  like: nnx.State,
  dequantise: Dequantise | None,
  engram: str,
) -> dict[str, Any]:
  """The model's arrays in one checkpoint: parameters and buffers, no optimizer."""
  stored = StoredArrays(path, step)
  encoded = {name.removesuffix("/codes") for name in stored if name.endswith("/codes")}
  table = {}
  if encoded:  # by a conversion, so the model is one that can be published
    table = {leaf.path: leaf for leaf in tensors_lib.leaves(config.model) if leaf.path in encoded}
  on_host = _tables_on_host(table.values(), dequantise, engram)
  if engram == "host" and config.model.engram_layers and not on_host:
    raise ConfigError("engram: is 'host'; the tables of this workdir are not quantised")
  wanted: dict[str, tuple[int, ...]] = {}  # arrays by name, and their shapes
  shapes = {name: array.shape for name, array in checkpoints.named(like).items()}
  for name, shape in shapes.items():
    if name in table:
      leaf = table[name]
      wanted[f"{name}/codes"] = (*leaf.stack, *leaf.codes_shape)
      wanted[f"{name}/scales"] = (*leaf.stack, *leaf.scales_shape)
    else:
      wanted[name] = shape
  for name, shape in wanted.items():
    found = stored.specs[name].shape if name in stored.specs else "absent"
    if found != shape:
      raise CheckpointError(f"step {stored.step}: {name} is {found}; this model has {shape}")

  leaves: dict[str, Any] = {}
  for name in shapes:
    if name in table:
      codes, scales = stored[f"{name}/codes"], stored[f"{name}/scales"]
      if name in on_host:
        leaves[name] = HostTable(codes[0], scales[0])  # each table stands alone in its run
        continue
      value = Quantised(codes, scales, table[name].encoding)
      if dequantise:
        value = importing.dequantised(table[name], value, dequantise, path)
    else:
      value = stored[name]
      if dequantise == "f32" and jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(np.float32)
    leaves[name] = jax.device_put(value)
  return leaves


# --- Devices -------------------------------------------------------------------------------------


def _tables_on_host(
  table: Iterable[Leaf], dequantise: Dequantise | None, engram: str
) -> frozenset[str]:
  """Paths of the quantised tables that are to stay on the host: all of them or none."""
  tables = [leaf for leaf in table if leaf.encoding == "fp8_row"]
  item = {None: 1 + 1 / TILE, "bf16": 2, "f32": 4}[dequantise]
  size = sum(math.prod(leaf.shape) for leaf in tables) * item
  if engram == "host" or (engram == "auto" and size > TABLE_SHARE * _device_bytes()):
    return frozenset(leaf.path for leaf in tables)
  return frozenset()


def _device_bytes() -> int:
  """Memory of the first device; of the machine where that is the CPU."""
  device = jax.devices()[0]
  stats = None if device.platform == "cpu" else device.memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"]
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
