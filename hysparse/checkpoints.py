"""Checkpoints of a workdir: arrays, the data position and their digests, together or not at all.

    <workdir>/checkpoints/<step>/state      the arrays, by Orbax
    <workdir>/checkpoints/<step>/position   JSON: where the data stands, digests of all the rest

Orbax writes into a temporary folder and renames it when all of it is there, so a step that is
listed is complete. What Orbax does not notice is a changed byte in an array; `position` therefore
holds a 32-bit digest of each array, checked on restore. A checkpoint that cannot be read is passed
over for the one before it, and the console says so.

Arrays are named by their path in the model ("runs/0/attn/wq_a/weight"), not by a module system's
internals: `named` and `unnamed` translate.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import pathlib
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, PyTree

FOLDER = "checkpoints"
DAMAGED_FOLDER = "damaged_checkpoints"


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written, read or used here; one line with its path."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint holds: the step, its arrays, the position of the data iterator."""

  step: int
  state: PyTree[Array]
  position: Mapping[str, Any]


# --- Names ---------------------------------------------------------------------------------------


def named(state: nnx.State) -> dict[str, Array]:
  """The arrays of an NNX state by path, `{"runs/0/attn/wq_a/weight": array}`; `unnamed` reverts."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {_name(path): leaf for path, leaf in leaves}


def unnamed(arrays: Mapping[str, Array], like: nnx.State) -> nnx.State:
  """The NNX state with the structure of `like` (abstract or not) and these arrays.

  Raises:
    KeyError: a name of `like` that `arrays` lacks.
  """
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(like)]
  return jax.tree.unflatten(jax.tree.structure(like), [arrays[_name(path)] for path in paths])


def _name(path: tuple) -> str:
  # An NNX path has a step from a Variable to its value, which may have parts ("codes", "scales").
  inside = (step for step in path if step != jax.tree_util.GetAttrKey("value"))
  return _joined(tuple(inside))


def _joined(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _by_path(tree: PyTree) -> dict[str, Any]:
  return {_joined(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# --- Digests -------------------------------------------------------------------------------------


@jax.jit
def _digests(leaves: list[Array]) -> Array:
  return jnp.stack([_digest(leaf) for leaf in leaves])


def _digest(x: Array) -> Array:
  """uint32: sum over elements of bits * (2 * index + 1), modulo 2^32.

  An odd factor is invertible, so one changed element always changes the sum. Integer sums do not
  depend on their order, hence not on how the array is sharded.
  """
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  words = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
  return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)


def digests(state: PyTree[Array]) -> dict[str, int]:
  """A 32-bit digest of every array (elements of up to 4 bytes) by its path."""
  leaves = _by_path(state)
  values = jax.device_get(_digests(list(leaves.values())))
  return {name: int(value) for name, value in zip(leaves, values, strict=True)}


# --- Reading and writing -------------------------------------------------------------------------


def steps_in(workdir: pathlib.Path) -> list[int]:
  """Complete steps of a workdir, without opening anything."""
  folder = pathlib.Path(workdir) / FOLDER
  if not folder.is_dir():
    return []
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


class Checkpoints:
  """The checkpoints of one workdir. Writes run in the background; `close` waits for them."""

  def __init__(
    self, workdir: pathlib.Path, keep: int, say: Callable[[str], None] = logging.warning
  ):
    """
    Args:
      workdir: of the experiment.
      keep: how many of the latest checkpoints stay.
      say: receives one line for each checkpoint that is passed over.
    """
    mute_leftovers()
    self._workdir = pathlib.Path(workdir).resolve()
    self._folder = self._workdir / FOLDER
    self._say = say
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    handlers = {"state": ocp.StandardCheckpointHandler(), "position": ocp.JsonCheckpointHandler()}
    self._manager = ocp.CheckpointManager(self._folder, item_handlers=handlers, options=options)

  @property
  def latest(self) -> int | None:
    """The newest complete step."""
    return self._manager.latest_step()

  def save(self, step: int, state: PyTree[Array], position: Mapping[str, Any]) -> None:
    """Starts writing; returns once the arrays are copied, so the caller may donate them.

    Raises:
      CheckpointError: this write could not start, or the one before it failed (disk full, ...).
    """
    record = position_record(position, digests(state))
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(record)
    )
    self._writing(lambda: self._manager.save(step, args=items))

  def wait(self) -> None:
    """Waits for the write in the background.

    Raises:
      CheckpointError: it failed.
    """
    self._writing(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits as `wait` does and lets go of the threads."""
    self.wait()
    self._manager.close()

  def restore(self, abstract: PyTree[jax.ShapeDtypeStruct]) -> Restored | None:
    """The newest checkpoint that can be read, or None where there is none.

    Newer ones that cannot are moved to `damaged_checkpoints`, so that their steps can be written
    again.

    Args:
      abstract: shapes and dtypes, with shardings where the arrays are to lie.

    Raises:
      CheckpointError: there are checkpoints but none can be read, or the newest readable one holds
        other arrays than `abstract`.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    problems: dict[int, str] = {}
    for step in steps:
      found = self._restore_or_problem(step, abstract)
      if isinstance(found, Restored):
        self._set_aside(problems, step)
        return found
      problems[step] = found
    if problems:
      tried = "; ".join(f"step {step}: {problem}" for step, problem in problems.items())
      raise CheckpointError(f"{self._folder}: no checkpoint can be read ({tried})")
    return None

  def _restore_or_problem(self, step: int, abstract: PyTree) -> Restored | str:
    try:
      return self._restore(step, abstract)
    except CheckpointError:
      raise
    except Exception as error:  # Orbax and TensorStore raise all kinds, bare Exception too
      return first_line(error)

  def _restore(self, step: int, abstract: PyTree[jax.ShapeDtypeStruct]) -> Restored:
    record = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))[
      "position"
    ]
    if _crc(record["data"]) != record["crc"]:
      raise ValueError("the data position does not match its checksum")
    self._compare(step, abstract, self._manager.item_metadata(step)["state"].tree)
    state = self._manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    )["state"]
    found = digests(state)
    for name, digest in record["arrays"].items():
      if found[name] != digest:
        raise ValueError(f"{name} does not match its digest")
    return Restored(step, state, record["data"])

  def _compare(self, step: int, abstract: PyTree, stored: PyTree) -> None:
    """One line on the first array whose name, shape or dtype is not what the model has."""

    ours, theirs = (
      {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _by_path(tree).items()}
      for tree in (abstract, stored)
    )
    for name in sorted(ours.keys() | theirs.keys()):
      if ours.get(name) != theirs.get(name):
        raise CheckpointError(
          f"{self._folder / str(step)}: {name} is {theirs.get(name, 'absent')}; this model has"
          f" {ours.get(name, 'no such array')}"
        )

  def _set_aside(self, problems: Mapping[int, str], restored: int) -> None:
    for step, problem in problems.items():
      target = self._workdir / DAMAGED_FOLDER / str(step)
      target.parent.mkdir(exist_ok=True)
      (self._folder / str(step)).rename(target)
      self._say(
        f"checkpoint {step} cannot be read ({problem}); moved to {target}, going on from"
        f" checkpoint {restored}"
      )
    if problems:
      self._manager.reload()

  def _writing(self, act: Callable[[], Any]) -> None:
    try:
      act()
    except Exception as error:
      raise CheckpointError(f"{self._folder}: cannot be written: {first_line(error)}") from error


@functools.cache
def mute_leftovers() -> None:
  """Drops what Orbax says of checkpoints that are in order, and what a failed read or write would
  print as it dies, a page for each array. The failure itself is raised, and told in one line.
  """
  hook = sys.unraisablehook

  def filtered(unraisable: Any) -> None:
    code = getattr(unraisable.object, "cr_code", None)
    leftover = code is not None and "orbax" in code.co_filename
    if not leftover and str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = filtered
  logging.getLogger("asyncio").addFilter(lambda r: "never retrieved" not in r.getMessage())
  harmless = ("Skipping merge of OCDBT", "Metadata file does not exist")
  logging.getLogger("absl").addFilter(lambda r: not any(h in r.getMessage() for h in harmless))


def position_record(position: Mapping[str, Any], arrays: Mapping[str, int]) -> dict[str, Any]:
  """What `position` of a checkpoint holds: the data position, guarded, and the arrays' digests."""
  return {"data": position, "arrays": arrays, "crc": _crc(position)}


def _crc(position: Mapping[str, Any]) -> int:
  return zlib.crc32(json.dumps(position, sort_keys=True).encode())


def first_line(error: Exception) -> str:
  """What went wrong, without TensorStore's specifications; its cause stands at the end."""
  line = next(iter(str(error).strip().splitlines()), "").split(" [")[0].split(". See full")[0]
  if len(line) > 160:
    line = f"{line[:60]} ... {line[-90:]}"
  return f"{type(error).__name__}: {line}"
