"""A folder that a conversion makes: complete under its name, or not there at all."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

from hysparse.conversion.progress import size
from hysparse.conversion.shards import FolderError


@contextlib.contextmanager
def building(target: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
  """A folder beside `target` to write to; it gets the name `target` when all went well.

  What goes wrong removes it. A killed process leaves it behind as `<target>.partial`, which nothing
  takes for complete.

  Args:
    target: missing, or an empty folder.
    nbytes: what will be written.

  Raises:
    FolderError: the target holds something, or the disk has no room or refuses.
  """
  target = pathlib.Path(target).resolve()
  if not target.name:
    raise FolderError(target, ["cannot be a target; a conversion writes to a new folder"])
  partial = target.with_name(f"{target.name}.partial")
  if target.exists() and not (target.is_dir() and not any(target.iterdir())):
    kind = "is not empty" if target.is_dir() else "is a file"
    raise FolderError(target, [f"{kind}; a conversion writes to a new folder"])
  if partial.exists():
    raise FolderError(
      partial, ["exists: a conversion is at work, or one was killed and this can be removed"]
    )
  try:
    partial.mkdir(parents=True)
    try:
      free = shutil.disk_usage(partial).free
      if free < nbytes:
        raise FolderError(target, [f"takes {size(nbytes)}; {size(free)} are free"])
      yield partial
      partial.rename(target)
    except BaseException:
      shutil.rmtree(partial, ignore_errors=True)
      raise
  except OSError as error:
    raise FolderError(target, [f"cannot be written: {error.strerror or error}"]) from error
