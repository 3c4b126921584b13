"""Writes a model as a released folder, one tensor at a time.

Codes and scales that a model holds are written as they are. What it holds as plain values is
quantised; given the folder that the values came from, a tensor that still equals what is stored
there, dequantised, gets the stored bytes. So only what was changed is rounded again. Without that
folder the dequantised values come back exactly, but not always their codes: the scale follows from
the largest value of a block, which rounding may have brought below the next power of two. Only FP8
blocks without a value above 1e-4, where the quantiser's scale stops, may be rounded again.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from hysparse_kernels.formats import Quantised, quantise
from jaxtyping import Array, Shaped

from hysparse import json_text, published
from hysparse import tokenizer as tokenizer_lib
from hysparse.checkpoint_arrays import StoredArrays
from hysparse.config import ModelConfig
from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.folder import CONFIG, TOKEN_MAP, open_folder
from hysparse.conversion.importing import TOKEN_MAP as TOKEN_MAP_LEAF
from hysparse.conversion.importing import decoded
from hysparse.conversion.origin import Origin, copy_small_files
from hysparse.conversion.progress import Progress
from hysparse.conversion.shard_writer import SHARD_BYTES, Entry, ShardWriter, index_text
from hysparse.conversion.shards import INDEX, SINGLE, FolderError, Stored, row_blocks, shortened
from hysparse.conversion.target import building
from hysparse.conversion.tensors import TILE, Leaf, Tensor, scale_name
from hysparse.nn.host_table import HostTable

LeafValue = Shaped[Array, "..."] | Quantised | HostTable  # what a model may hold in a place

_NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}


def listing(config: ModelConfig, dtypes: Mapping[str, str] | None = None) -> dict[str, Entry]:
  """Every tensor of an export by its released name: 96,085 of the released model.

  Args:
    config: the model.
    dtypes: of tensors that a reader accepts in more than one dtype; by default the first.

  Raises:
    ConfigError: what has no published form, by field.
  """
  dtypes = dtypes or {}
  return {
    t.name: Entry(found if (found := dtypes.get(t.name)) in t.dtypes else t.dtype, t.shape)
    for t in tensors_lib.tensors(config)
  }


def arrays_of(leaves: nnx.State | Mapping[str, LeafValue]) -> dict[str, Shaped[Array, "..."]]:
  """The arrays of a model by name, as a checkpoint has them: codes and scales apart."""
  if isinstance(leaves, nnx.State):
    flat = nnx.to_flat_state(leaves)
    leaves = {"/".join(map(str, path)): variable.get_value() for path, variable in flat}
  arrays: dict[str, Shaped[Array, "..."]] = {}
  for name, leaf in leaves.items():
    if isinstance(leaf, HostTable):  # alone in its run, which the others have an axis for
      arrays |= {f"{name}/codes": leaf.codes[None], f"{name}/scales": leaf.scales[None]}
    elif isinstance(leaf, Quantised):
      arrays |= {f"{name}/codes": leaf.codes, f"{name}/scales": leaf.scales}
    else:
      arrays[name] = leaf
  return arrays


def export(
  config: ModelConfig,
  leaves: nnx.State | StoredArrays | Mapping[str, LeafValue],
  target: pathlib.Path | str,
  *,
  base: pathlib.Path | str | None = None,
  kept: Origin | None = None,
  shard_bytes: int = SHARD_BYTES,
  say: Callable[[str], None] = lambda text: None,
) -> None:
  """Writes a released folder, whole or not at all.

  Args:
    config: the model.
    leaves: its state, its leaves by name (checkpoints.py), or the arrays of a checkpoint, which are
      then read one by one. Plain ones are float32 or bfloat16.
    target: missing or an empty folder.
    base: a released folder; tensors of equal values get its bytes. It also decides names, files,
      dtypes and config.json where it holds the same model.
    kept: small files of where the model came from; what `base` says goes first.
    shard_bytes: size of a file, where no index decides.
    say: receives lines on the progress and on what a reader of the folder will not know.

  Raises:
    ConfigError: what has no published form, by field; nothing is written.
    FolderError: arrays that are not the model's or not finite, problems of the base or the disk.
    CheckpointError, TokenizerError: from a checkpoint, and from a tokenizer that goes along.
  """
  target = pathlib.Path(target)
  origins = [Origin.of_folder(open_folder(base))] if base is not None else []
  origins += [kept] if kept is not None else []
  first = origins[0] if origins else Origin(target, {}, {}, {})
  entries = listing(config, first.dtypes)
  names, files = first.layout(entries, shard_bytes)
  arrays = leaves if isinstance(leaves, StoredArrays) else arrays_of(leaves)
  table = list(tensors_lib.leaves(config))
  problems = list(_problems(config, table, arrays))
  if problems:
    raise FolderError(target, problems)
  for lost in published.lost_in_publishing(config):
    say(f"note: {lost}")
  spelled = {names[name]: entry for name, entry in entries.items()}
  total = sum(entry.nbytes for entry in entries.values())
  with building(target, total) as folder:
    tokenizers = [o for o in origins if (o.path / tokenizer_lib.FILE_NAME).exists()]
    for origin in (tokenizers or origins)[-1:]:
      copy_small_files(origin.path, folder)
    _write_config(folder, config, origins)
    _write_index(folder, spelled, files, first)
    if config.engram_layers:
      _write_token_map(folder, np.asarray(arrays[TOKEN_MAP_LEAF]))
    else:
      (folder / TOKEN_MAP).unlink(missing_ok=True)
    with ShardWriter(folder, spelled, files) as writer:
      job = _Job(entries, names, first.tensors, writer, Progress(total, say))
      for leaf in table:
        job.write(leaf, arrays)


# --- Tensors -------------------------------------------------------------------------------------


class _Job:
  """Writes the tensors of leaf after leaf."""

  def __init__(
    self,
    entries: Mapping[str, Entry],
    names: Mapping[str, str],
    base: Mapping[str, Stored],
    writer: ShardWriter,
    progress: Progress,
  ):
    self._entries, self._names, self._writer, self._progress = entries, names, writer, progress
    # A tensor of another shape or dtype has nothing to give.
    self._base = {
      name: stored
      for name, stored in base.items()
      if name in entries and (stored.dtype, stored.shape) == entries[name]
    }

  def write(self, leaf: Leaf, arrays: Mapping[str, Array]) -> None:
    if f"{leaf.path}/codes" in arrays:
      for part in ("codes", "scales"):
        array = arrays[f"{leaf.path}/{part}"]
        for tensor in leaf.tensors():
          if tensor.part == part:
            self._put(tensor.name, _blocks(np.asarray(array[tensor.index])))
      return
    array = arrays[leaf.path]
    for tensor in leaf.tensors():
      if tensor.part == "scales":
        continue  # written with its codes
      values = _on_disk(np.asarray(array[tensor.index]), leaf)
      if not self._write_stored(tensor, values):
        self._write_values(tensor, values)

  def _write_stored(self, tensor: Tensor, values: np.ndarray) -> bool:
    """Writes the bytes of the base if they mean these values."""
    parts = [tensor.name]
    if tensor.leaf.is_quantised:
      parts.append(scale_name(tensor.name))
    if any(name not in self._base for name in parts):
      return False
    stored = [self._base[name] for name in parts]
    if not all(
      np.array_equal(_bits(theirs), _bits(values[rows]))
      for rows, theirs in _stored_values(stored, tensor.leaf, values.dtype)
    ):
      return False
    for name in parts:
      self._put(name, (block for _, block in self._base[name].blocks()))
    return True

  def _write_values(self, tensor: Tensor, values: np.ndarray) -> None:
    leaf, scales = tensor.leaf, []

    def codes() -> Iterator[np.ndarray]:
      for block in _finite(tensor, values):
        quantised = _quantise(block, leaf.encoding)
        scales.append(np.asarray(quantised.scales))
        yield np.asarray(quantised.codes)

    if leaf.is_quantised:
      self._put(tensor.name, codes())
      self._put(scale_name(tensor.name), scales)
    else:
      dtype = _NUMPY[self._entries[tensor.name].dtype]
      self._put(tensor.name, (_cast(tensor, block, dtype) for block in _finite(tensor, values)))

  def _put(self, name: str, blocks: Iterator[np.ndarray] | list[np.ndarray]) -> None:
    self._writer.write(self._names[name], blocks)
    self._progress.add(self._entries[name].nbytes)


def _on_disk(values: np.ndarray, leaf: Leaf) -> np.ndarray:
  """The values of one tensor in the orientation of the folder."""
  if leaf.layout == "kept":
    return values
  return np.swapaxes(values, -1, -2).reshape(leaf.shape)


def _stored_values(
  stored: list[Stored], leaf: Leaf, dtype: np.dtype
) -> Iterator[tuple[slice, np.ndarray]]:
  """What a tensor of the base gives in a model whose array has this dtype, rows by rows."""
  if not leaf.is_quantised:
    yield from ((rows, block.astype(dtype)) for rows, block in stored[0].blocks(TILE))
    return
  yield from decoded(stored[0].blocks(TILE), stored[1].read(), leaf, dtype)


@jax.jit(static_argnums=1)
def _quantise(block: jax.Array, format: tensors_lib.Encoding) -> Quantised:
  return quantise(block, format)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
  return (block for _, block in row_blocks(array, TILE))


def _finite(tensor: Tensor, values: np.ndarray) -> Iterator[np.ndarray]:
  """Whole tiles of rows at a time.

  Raises:
    FolderError: an infinity or a NaN.
  """
  for block in _blocks(values):
    block = np.ascontiguousarray(block)
    if not np.isfinite(block).all():
      raise _unfit(tensor, "are not all finite")
    yield block


def _cast(tensor: Tensor, block: np.ndarray, dtype: np.dtype) -> np.ndarray:
  with np.errstate(over="ignore"):  # told below
    cast = block.astype(dtype)
  if not np.isfinite(cast).all():
    raise _unfit(tensor, f"exceed what {dtype} can hold")
  return cast


def _unfit(tensor: Tensor, problem: str) -> FolderError:
  where = f"{tensor.leaf.path}{list(tensor.index) or ''}"
  return FolderError(pathlib.Path(tensor.name), [f"the values of {where} {problem}"])


def _bits(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).view(f"uint{8 * array.dtype.itemsize}")


# --- What is checked before anything is written --------------------------------------------------


def _problems(config: ModelConfig, table: list[Leaf], arrays: Mapping[str, Array]) -> Iterator[str]:
  """Lines on arrays that are missing, wrong or not of this model; nothing is read."""
  specs: Mapping[str, Any] = arrays.specs if isinstance(arrays, StoredArrays) else arrays
  plain = {str(dtype) for dtype in _NUMPY.values()}
  wanted, missing, wrong = set(), [], []
  expected: list[tuple[str, tuple[int, ...], set[str]]] = []
  for leaf in table:
    if f"{leaf.path}/codes" in specs and leaf.is_quantised:
      expected.append((f"{leaf.path}/codes", (*leaf.stack, *leaf.codes_shape), {"uint8"}))
      expected.append((f"{leaf.path}/scales", (*leaf.stack, *leaf.scales_shape), {"uint8"}))
    else:
      expected.append((leaf.path, leaf.model_shape, plain))
  if config.engram_layers:
    expected.append((TOKEN_MAP_LEAF, (config.vocab_size,), {"int32"}))
  for name, shape, dtypes in expected:
    wanted.add(name)
    found = specs.get(name)
    if found is None:
      missing.append(name)
    elif tuple(found.shape) != shape or str(found.dtype) not in dtypes:
      legal = " or ".join(sorted(dtypes))
      wrong.append(f"{name} is {found.dtype} {list(found.shape)}, must be {legal} {list(shape)}")
  others = [name for name in specs if name not in wanted]
  if missing:
    yield f"the model lacks arrays: {shortened(missing)}"
  if others:
    yield f"the model has arrays without a place in a release: {shortened(others)}"
  if wrong:
    yield f"arrays of another shape or dtype: {shortened(wrong, '; ')}"


# --- Small files ---------------------------------------------------------------------------------


def _write_config(folder: pathlib.Path, config: ModelConfig, origins: list[Origin]) -> None:
  stored = (origin.config_bytes(config) for origin in origins)
  content = next((found for found in stored if found is not None), None)
  if content is None:
    ids = {}
    if (folder / tokenizer_lib.FILE_NAME).exists():
      tokenizer = tokenizer_lib.load(folder)
      ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_id") for n in ("bos", "eos", "pad")}
    content = (json.dumps(published.to_published(config, **ids), indent=2) + "\n").encode()
  (folder / CONFIG).write_bytes(content)


def _write_index(
  folder: pathlib.Path, entries: Mapping[str, Entry], files: Mapping[str, str], origin: Origin
) -> None:
  """The origin's index byte for byte if it says the same; none for a single file without one."""
  text, path = index_text(entries, files), folder / INDEX
  stored = origin.path / INDEX
  if stored.exists() and json_text.parse(stored.read_bytes()) == json_text.parse(text):
    path.write_bytes(stored.read_bytes())
  elif set(files.values()) == {SINGLE}:
    path.unlink(missing_ok=True)
  else:
    path.write_text(text, encoding="utf-8")


def _write_token_map(folder: pathlib.Path, token_map: np.ndarray) -> None:
  """Leaves the file that is there if it says the same."""
  path = folder / TOKEN_MAP
  if not (path.exists() and np.array_equal(np.load(path), token_map)):
    np.save(path, token_map.astype(np.int32))
