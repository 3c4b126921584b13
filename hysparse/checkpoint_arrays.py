"""The arrays of a checkpoint one by one: written as they are made, read as they are asked for.

`checkpoints.py` holds a whole state in memory at both ends. A converted model may be larger than
that: here one large array, or a few megabytes of small ones, is there at a time. The files are the
same: a checkpoint of `write` is one that `Checkpoints` lists, and `StoredArrays` reads those of
training too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jaxtyping import Shaped

from hysparse import checkpoints, json_text
from hysparse.checkpoints import CheckpointError

# The groups of a stored state that a model is made of; see training/state.py.
PARAMS, BUFFERS = "params", "buffers"
_GROUPS = (PARAMS, BUFFERS)

_BLOCK_ELEMENTS = 1 << 20
_CHUNK_BYTES = 4 << 20
_BATCH_BYTES = 4 << 20  # small arrays travel together: each trip costs a sync of the disk
_BATCHES_KEPT = 4
_CHUNKS_READ = 2  # at a time; TensorStore's default would be a second copy of the array


@dataclasses.dataclass(frozen=True)
class Later:
  """An array that is made when it is its turn to be written.

  Attributes:
    shape, dtype: of what `make` returns.
    make: called once.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], Shaped[np.ndarray, "..."]]


def digest(array: Shaped[np.ndarray, "..."]) -> int:
  """`checkpoints.digests` of one array of the host, block by block."""
  bits = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
  total = 0
  for start in range(0, len(bits), _BLOCK_ELEMENTS):
    words = bits[start : start + _BLOCK_ELEMENTS].astype(np.uint32)
    factors = 2 * np.arange(start, start + len(words), dtype=np.uint64) + 1
    words *= factors.astype(np.uint32)  # both wrap, as the sum modulo 2^32 wants
    total += int(np.sum(words, dtype=np.uint64))
  return total % 2**32


def write(
  workdir: pathlib.Path,
  step: int,
  arrays: Mapping[str, Later],
  buffers: Collection[str] = (),
) -> None:
  """Writes a checkpoint with no optimizer and no data position, whole or not at all.

  Args:
    workdir: of the experiment.
    step: under which it is listed.
    arrays: by name, see checkpoints.named.
    buffers: names of those that no gradient trains.

  Raises:
    CheckpointError: the disk refuses. What an array raises as it is made passes through.
  """
  checkpoints.mute_leftovers()
  workdir = pathlib.Path(workdir).resolve()
  folder, temporary = workdir / checkpoints.FOLDER, workdir / f".checkpoint-{step}.partial"
  shutil.rmtree(temporary, ignore_errors=True)
  writer = _Writer()
  tree: dict[str, dict[str, Later]] = {}
  for name, array in arrays.items():
    tree.setdefault(BUFFERS if name in buffers else PARAMS, {})[name] = array
  try:
    temporary.mkdir(parents=True)
    # Compressed chunks of a whole array would wait in memory for their turn to be written, and an
    # OCDBT database keeps something of every chunk (160 MB after 4 GB): each array has its files.
    handler = ocp.PyTreeCheckpointHandler(
      type_handler_registry=ocp.type_handlers.create_type_handler_registry(
        (Later, writer), (jax.Array, ocp.type_handlers.ArrayHandler())
      ),
      use_compression=False,
      use_ocdbt=False,
    )
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
      checkpointer.save(temporary / "state", args=ocp.args.PyTreeSave(tree, save_args=chunks))
    digests = {
      f"{group}/{name}": writer.digests[name] for group, those in tree.items() for name in those
    }
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
      record = checkpoints.position_record({}, digests)
      checkpointer.save(temporary / "position", args=ocp.args.JsonSave(record))
    folder.mkdir(exist_ok=True)
    temporary.rename(folder / str(step))
  except Exception as error:
    shutil.rmtree(temporary, ignore_errors=True)
    if writer.failure is not None:
      raise writer.failure from None
    raise CheckpointError(
      f"{folder}: cannot be written: {checkpoints.first_line(error)}"
    ) from error


class _Writer(ocp.type_handlers.NumpyHandler):
  """Makes, stores and lets go of one array after the other; stored, they are ordinary ones."""

  def __init__(self):
    super().__init__(deepcopy_host_arrays=False)
    self.digests: dict[str, int] = {}
    self.failure: Exception | None = None  # of a `make`, which is no failure of the disk

  async def serialize(
    self, values: Sequence[Later], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[Any]:
    args = args or [ocp.SaveArgs()] * len(values)
    sizes = [math.prod(value.shape) * value.dtype.itemsize for value in values]
    for batch in _batches(range(len(values)), sizes):
      arrays = [self._made(values[i], infos[i].keypath[-1].key) for i in batch]
      its = [infos[i] for i in batch], [args[i] for i in batch]
      for written in await super().serialize(arrays, *its):
        written.result()
      del arrays  # before the next are made
    return []

  async def _open_and_write(
    self, value: Shaped[np.ndarray, "..."], tspec: dict[str, Any], ts_context: ts.Context
  ) -> None:
    # Orbax hands over the whole array, and TensorStore copies chunks faster than a disk takes them.
    store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
    steps = zip(value.shape, store.chunk_layout.write_chunk.shape, strict=True)
    spans = [[slice(i, min(i + n, size)) for i in range(0, size, n)] for size, n in steps]
    for chunk in itertools.product(*spans):
      await store[chunk].write(value[chunk], can_reference_source_data_indefinitely=True)

  def _made(self, value: Later, name: str) -> Shaped[np.ndarray, "..."]:
    try:
      array = value.make()
      if (array.shape, array.dtype) != (value.shape, value.dtype):
        raise ValueError(f"{name}: made {array.dtype}{array.shape}, announced {value}")
    except Exception as error:
      self.failure = error
      raise
    self.digests[name] = digest(array)
    return array


class _Reader(ocp.type_handlers.NumpyHandler):
  """Reads arrays without a second copy of each beside it."""

  async def deserialize(
    self, infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[np.ndarray]:
    limit = {"limit": _CHUNKS_READ}
    limits = {"file_io_concurrency": limit, "data_copy_concurrency": limit}
    limited = [copy.copy(info) for info in infos]
    for info in limited:
      info.ts_context = ts.Context(limits, info.ts_context)
    return await super().deserialize(limited, args)


def _batches(items: Iterable[Any], sizes: Iterable[int]) -> Iterator[list[Any]]:
  """Items in order, as many at a time as `_BATCH_BYTES` hold, or one that is larger."""
  batch, total = [], 0
  for item, size in zip(items, sizes, strict=True):
    if batch and total + size > _BATCH_BYTES:
      yield batch
      batch, total = [], 0
    batch.append(item)
    total += size
  if batch:
    yield batch


class StoredArrays(Mapping[str, np.ndarray]):
  """The arrays of a model in a checkpoint, by name, read when asked for.

  `stored[name]` raises `CheckpointError` if the array or one beside it cannot be read or does not
  match its digest. Small arrays are read with their neighbours, which are kept for a while.

  Attributes:
    step: of the checkpoint.
    specs: shapes and dtypes, without reading anything.
  """

  def __init__(self, workdir: pathlib.Path, step: int | None = None):
    """
    Args:
      workdir: of an experiment or a conversion.
      step: of the checkpoint; None: the newest.

    Raises:
      CheckpointError: no such step, or one that cannot be read.
    """
    checkpoints.mute_leftovers()
    steps = checkpoints.steps_in(workdir)
    if not steps or step not in (None, *steps):
      found = f"has {', '.join(map(str, steps))}" if steps else "has none"
      asked = "checkpoint" if step is None else f"checkpoint of step {step}"
      raise CheckpointError(f"{workdir}: {asked}: is missing; the workdir {found}")
    self.step: int = steps[-1] if step is None else step
    self._folder = pathlib.Path(workdir).resolve() / checkpoints.FOLDER / str(self.step)
    with self._reading("checkpoint"):
      record = json_text.parse((self._folder / "position" / "metadata").read_bytes())
      self._digests: dict[str, int] = dict(record["arrays"])
      with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(self._folder / "state").item_metadata.tree
    self._groups = {name: group for group in _GROUPS for name in tree.get(group, {})}
    self.specs: dict[str, jax.ShapeDtypeStruct] = {
      name: jax.ShapeDtypeStruct(tree[group][name].shape, tree[group][name].dtype)
      for name, group in self._groups.items()
    }
    sizes = (math.prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values())
    self._batch_of = {name: tuple(batch) for batch in _batches(self.specs, sizes) for name in batch}
    self._read: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

  def __getitem__(self, name: str) -> Shaped[np.ndarray, "..."]:
    batch = self._batch_of[name]
    if name not in self._read.get(batch, ()):
      self._read[batch] = self._restore(batch)
      while len(self._read) > _BATCHES_KEPT:
        del self._read[next(iter(self._read))]
    return self._read[batch].pop(name)  # handed out once: the caller may change it

  def _restore(self, names: Sequence[str]) -> dict[str, Shaped[np.ndarray, "..."]]:
    item: dict[str, dict[str, Any]] = {}
    for name in names:
      item.setdefault(self._groups[name], {})[name] = 0
    kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    registry = ocp.type_handlers.create_type_handler_registry(
      (np.ndarray, _Reader()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    args = ocp.args.PyTreeRestore(item=item, restore_args=kinds, partial_restore=True)
    with (
      self._reading(names[0] if len(names) == 1 else f"{names[0]} and others"),
      ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer,
    ):
      found = checkpointer.restore(self._folder / "state", args=args)
    arrays = {name: found[self._groups[name]][name] for name in names}
    for name, array in arrays.items():
      if digest(array) != self._digests.get(f"{self._groups[name]}/{name}"):
        raise CheckpointError(f"{self._folder}: {name} does not match its digest")
    return arrays

  def __contains__(self, name: object) -> bool:
    return name in self._groups  # without reading it

  def __iter__(self) -> Iterator[str]:
    return iter(self._groups)

  def __len__(self) -> int:
    return len(self._groups)

  @contextlib.contextmanager
  def _reading(self, what: str) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Orbax and TensorStore raise all kinds
      raise CheckpointError(
        f"{self._folder}: {what} cannot be read ({checkpoints.first_line(error)})"
      ) from error
