"""Released folder to workdir and back: what scripts/convert_checkpoint.py calls.

A converted workdir has one checkpoint, of step 0, without an optimizer; `experiment.json` also says
what was converted; `released/` keeps the small files of the folder, from which an export takes
names, files and config. `hysparse.load` reads it as any other; training does not go on
in it.

Either way one array of the model (experts of a run of layers, one Engram table) with its scales is
in memory at a time, and a few chunks of 4 MB on their way to or from the disk.
"""

from __future__ import annotations

import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from hysparse_kernels.formats import Quantised
from jaxtyping import Shaped, UInt8

from hysparse import checkpoint_arrays, checkpoints
from hysparse import tokenizer as tokenizer_lib
from hysparse import workdir as workdir_lib
from hysparse.checkpoint_arrays import Later, StoredArrays
from hysparse.checkpoints import CheckpointError
from hysparse.config import Config, ConfigError, ModelConfig
from hysparse.conversion import allocator
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.exporting import export
from hysparse.conversion.folder import Folder, open_folder
from hysparse.conversion.importing import TOKEN_MAP, Dequantise, dtype_of, read_leaf
from hysparse.conversion.load import experiment_of
from hysparse.conversion.origin import Origin, copy_small_files
from hysparse.conversion.progress import Progress, size
from hysparse.conversion.shards import FolderError
from hysparse.conversion.target import building
from hysparse.conversion.tensors import Leaf
from hysparse.nn.model import abstract
from hysparse.tokenizer import TokenizerError
from hysparse.workdir import WorkdirError

USER_ERRORS = (ConfigError, FolderError, WorkdirError, CheckpointError, TokenizerError)

Say = Callable[[str], None]


def convert(
  source: pathlib.Path,
  target: pathlib.Path,
  *,
  base: pathlib.Path | None = None,
  dequantise: Dequantise | None = None,
  step: int | None = None,
  say: Say = print,
) -> None:
  """Writes a released folder as a workdir, or a workdir as a released folder.

  Args:
    source: which of the two it is decides the direction.
    target: missing or an empty folder; made whole or not at all.
    base: to a released folder only, see exporting.export.
    dequantise: to a workdir only, see importing.read_leaf.
    step: of a workdir's checkpoint; None: the newest.
    say: receives lines on the progress.

  Raises:
    ConfigError, FolderError, WorkdirError, CheckpointError, TokenizerError: one line each, or all
      that is wrong with a released folder.
  """
  allocator.return_freed_buffers()
  if (source / workdir_lib.EXPERIMENT).exists():
    if dequantise is not None:
      raise ConfigError(f"dequantise: is {dequantise!r}; {source} is a workdir, which is converted"
                        " to a released folder")  # fmt: skip
    to_folder(source, target, base=base, step=step, say=say)
    return
  for name, value in (("base", base), ("step", step)):
    if value is not None:
      raise ConfigError(f"{name}: is {str(value)!r}; applies only to a source that is a workdir;"
                        f" {source} has no {workdir_lib.EXPERIMENT}")  # fmt: skip
  to_workdir(source, target, dequantise=dequantise, say=say)


def to_folder(
  source: pathlib.Path,
  target: pathlib.Path,
  *,
  base: pathlib.Path | None = None,
  step: int | None = None,
  say: Say = print,
) -> None:
  """A workdir, trained or converted, as a released folder. See `convert`."""
  record = workdir_lib.read_experiment(source)
  try:
    config = Config.from_dict(record["config"])
  except ConfigError as error:
    raise WorkdirError(f"{source / workdir_lib.EXPERIMENT}: {error}") from None
  arrays = StoredArrays(source, step)
  kept = Origin(source, {}, {}, {})
  if workdir_lib.CONVERTED in record:
    try:
      dtypes = _kept_dtypes(record[workdir_lib.CONVERTED], config.model)
    except ValueError as error:
      raise WorkdirError(
        f"{source / workdir_lib.EXPERIMENT}: {workdir_lib.CONVERTED} {error}"
      ) from None
    kept = Origin.kept(source / workdir_lib.RELEASED, dtypes)
  say(f"{source}, step {arrays.step}: {_size(arrays.specs)}, to {target}")
  export(config.model, arrays, target, base=base, kept=kept, say=say)
  say(f"{target}: done")


def to_workdir(
  source: pathlib.Path,
  target: pathlib.Path,
  *,
  dequantise: Dequantise | None = None,
  say: Say = print,
) -> None:
  """A released folder as a workdir. See `convert`."""
  folder = open_folder(source)
  config = experiment_of(folder.config)
  arrays = _arrays(folder, dequantise)
  _, buffers = nnx.split_state(abstract(config)[1], nnx.Param, ...)
  total = sum(_nbytes(array) for array in arrays.values())
  progress = Progress(total, say)
  told = {name: _told(array, progress) for name, array in arrays.items()}
  with building(target, total) as partial:
    say(f"{source}: {_size(arrays)}, to {target}")
    kept = partial / workdir_lib.RELEASED
    if tokenizer_lib.FILE_NAME in copy_small_files(source, kept):
      shutil.copyfile(kept / tokenizer_lib.FILE_NAME, partial / tokenizer_lib.FILE_NAME)
    checkpoint_arrays.write(partial, 0, told, checkpoints.named(buffers))
    converted = {
      "source": source.name,
      "dequantise": dequantise,
      "dtypes": _unusual_dtypes(folder),
    }
    workdir_lib.write_experiment(partial, config, **{workdir_lib.CONVERTED: converted})
  say(f"{target}: done")


def _arrays(folder: Folder, dequantise: Dequantise | None) -> dict[str, Later]:
  """The arrays of the model, each read from the folder when it is asked for."""
  arrays: dict[str, Later] = {}
  for leaf in tensors_lib.leaves(folder.config):
    if leaf.is_quantised and dequantise is None:
      both = _CodesAndScales(folder, leaf)
      for part, shape in (("codes", leaf.codes_shape), ("scales", leaf.scales_shape)):
        name = f"{leaf.path}/{part}"
        arrays[name] = Later((*leaf.stack, *shape), np.dtype(np.uint8), getattr(both, part))
    else:

      def make(leaf: Leaf = leaf) -> Shaped[np.ndarray, "..."]:
        return read_leaf(folder, leaf, dequantise)

      arrays[leaf.path] = Later(leaf.model_shape, dtype_of(folder, leaf, dequantise), make)
  if folder.token_map is not None:
    found = folder.token_map
    arrays[TOKEN_MAP] = Later(found.shape, found.dtype, lambda: found)
  return arrays


class _CodesAndScales:
  """Reads a leaf once for two arrays that are asked for one after the other."""

  def __init__(self, folder: Folder, leaf: Leaf):
    self._folder, self._leaf = folder, leaf
    self._read: Quantised | None = None

  def codes(self) -> UInt8[np.ndarray, "..."]:
    self._read = read_leaf(self._folder, self._leaf)
    return self._read.codes

  def scales(self) -> UInt8[np.ndarray, "..."]:
    read, self._read = self._read, None
    return read.scales


def _told(array: Later, progress: Progress) -> Later:
  def make() -> Shaped[np.ndarray, "..."]:
    made = array.make()
    progress.add(made.nbytes)
    return made

  return Later(array.shape, array.dtype, make)


def _unusual_dtypes(folder: Folder) -> dict[str, str]:
  """Of tensors that may be in more than one dtype, those that are not in the usual one."""
  found = folder.shards.tensors
  return {
    tensor.name: found[tensor.name].dtype
    for tensor in tensors_lib.tensors(folder.config)
    if found[tensor.name].dtype != tensor.dtype
  }


def _kept_dtypes(converted: Any, model: ModelConfig) -> dict[str, str]:
  """What `_unusual_dtypes` wrote.

  Raises:
    ValueError: anything else, without the name of the file.
    ConfigError: a model that has no published form.
  """
  dtypes = converted.get("dtypes") if isinstance(converted, dict) else None
  if not isinstance(dtypes, dict):
    raise ValueError(f"is {converted!r:.80}; must hold dtypes, an object of tensors")
  legal = {tensor.name: tensor.dtypes for tensor in tensors_lib.tensors(model)}
  for name, dtype in dtypes.items():
    if name not in legal:
      raise ValueError(f"has a dtype of {name}, which is no tensor of this model")
    if dtype not in legal[name]:
      raise ValueError(f"says {name} is {dtype!r:.80}; must be {' or '.join(legal[name])}")
  return dtypes


def _nbytes(array: Any) -> int:
  return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _size(arrays: dict[str, Any]) -> str:
  return f"{len(arrays):,} arrays, {size(sum(map(_nbytes, arrays.values())))}"
