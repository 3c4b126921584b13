"""The leaves of a model from a released folder, one at a time.

A leaf is allocated once and filled tensor by tensor, a block of rows at a time: beyond the leaves
that the caller holds there is never more than the scales of one tensor. Infinities and NaNs are
refused on the way, by the name of their tensor.
"""

from __future__ import annotations

import functools
import math
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hysparse_kernels.formats import Quantised
from jaxtyping import Shaped

from hysparse.conversion import tensors as tensors_lib
from hysparse.conversion.folder import Folder
from hysparse.conversion.shards import FolderError, Stored, row_blocks
from hysparse.conversion.tensors import Leaf, Tensor

TOKEN_MAP = "token_map"  # the path of Engram's id map in a model's state

Dequantise = Literal["bf16", "f32"]

_ALIGNMENT = 64  # bytes
_DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
# What is no number has all of these bits. E2M1 has no such code.
_NOT_FINITE = {"F8_E4M3": 0x7F, "F8_E8M0": 0xFF, "BF16": 0x7F80, "F32": 0x7F800000}


def leaves(
  folder: Folder, dequantise: Dequantise | None = None
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."] | Quantised]]:
  """(path in the model's state, leaf) of every array of the model, the Engram id map included.

  Raises:
    FolderError: as `read_leaf`.
  """
  for leaf in tensors_lib.leaves(folder.config):
    yield leaf.path, read_leaf(folder, leaf, dequantise)
  if folder.token_map is not None:
    yield TOKEN_MAP, folder.token_map


def read_leaf(
  folder: Folder, leaf: Leaf, dequantise: Dequantise | None = None
) -> Shaped[np.ndarray, "..."] | Quantised:
  """One leaf, in host memory.

  Args:
    folder: where from.
    leaf: of the table of the folder's config.
    dequantise: None keeps what is quantised as codes and scales and all else in the dtype on disk.
      "bf16" makes plain bfloat16 arrays of what is quantised. "f32" makes plain float32 arrays of
      everything, which is what training keeps.

  Raises:
    FolderError: a value that is not finite, or a file that cannot be read any more.
  """
  read = functools.partial(_blocks, folder)
  if leaf.is_quantised and dequantise:
    return _dequantised(leaf, read, dequantise, folder.path, folder.shards.tensors)
  if leaf.is_quantised:
    codes = empty((*leaf.stack, *leaf.codes_shape), np.dtype(np.uint8))
    scales = empty((*leaf.stack, *leaf.scales_shape), np.dtype(np.uint8))
    for tensor in leaf.tensors():
      out = codes if tensor.part == "codes" else scales
      for rows, block in read(tensor):
        out[tensor.index][rows] = block
    return Quantised(codes, scales, leaf.encoding)
  out = empty(leaf.model_shape, dtype_of(folder, leaf, dequantise))
  for tensor in leaf.tensors():
    for rows, block in read(tensor):
      _place(out[tensor.index], rows, block, leaf)
  return out


def dtype_of(folder: Folder, leaf: Leaf, dequantise: Dequantise | None = None) -> np.dtype:
  """Of the plain array that `read_leaf` gives."""
  stored = [folder.shards.tensors[name].dtype for name in leaf.names]  # Engram's may be either
  wide = dequantise == "f32" or (not leaf.is_quantised and "F32" in stored)
  return _DTYPES["f32" if wide else "bf16"]


def dequantised(
  leaf: Leaf, quantised: Quantised, dequantise: Dequantise, source: pathlib.Path
) -> Shaped[np.ndarray, "..."]:
  """The plain array of a quantised leaf in host memory, a block of rows at a time.

  Raises:
    FolderError: a value that is not finite, by tensor; `source` is where the leaf came from.
  """

  def read(tensor: Tensor) -> Iterator[tuple[slice, np.ndarray]]:
    part = quantised.codes if tensor.part == "codes" else quantised.scales
    return row_blocks(part[tensor.index], leaf.tile_rows)

  return _dequantised(leaf, read, dequantise, source)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
  """`np.empty` at an address that lets jax take the array as it is where the device is the CPU."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


def _dequantised(
  leaf: Leaf,
  read: Callable[[Tensor], Iterator[tuple[slice, np.ndarray]]],
  dequantise: Dequantise,
  source: pathlib.Path,
  stored: Mapping[str, Stored] = types.MappingProxyType({}),
) -> Shaped[np.ndarray, "..."]:
  dtype = _DTYPES[dequantise]
  out = empty(leaf.model_shape, dtype)
  parts = leaf.tensors()
  for codes, scales in zip(parts, parts, strict=True):
    factors = np.concatenate([block for _, block in read(scales)])
    for rows, values in decoded(read(codes), factors, leaf, dtype):
      if not np.isfinite(values).all():  # a code and a scale that are, but not their product
        place = f"rows {rows.start}..{rows.stop - 1} of {codes.name}"
        if codes.name in stored:
          place = f"{stored[codes.name].file.name}: {place}"
        raise FolderError(source, [f"{place} are not all finite in {dtype}"])
      _place(out[codes.index], rows, values, leaf)
  return out


def decoded(
  blocks: Iterable[tuple[slice, np.ndarray]], scales: np.ndarray, leaf: Leaf, dtype: np.dtype
) -> Iterator[tuple[slice, np.ndarray]]:
  """Values of one quantised tensor, for blocks of whole tiles of its codes and all its scales."""
  height = leaf.tile_rows
  for rows, codes in blocks:
    its = np.asarray(scales[rows.start // height : -(-rows.stop // height)])
    yield rows, np.asarray(_values(Quantised(codes, its, leaf.encoding), dtype))


@jax.jit(static_argnums=1)
def _values(part: Quantised, dtype: np.dtype) -> jax.Array:
  return part.dequantise(jnp.dtype(dtype))


def _blocks(folder: Folder, tensor: Tensor) -> Iterator[tuple[slice, np.ndarray]]:
  """Whole tiles of rows at a time, none with a value that is not finite."""
  stored = folder.shards.tensors[tensor.name]
  bits = _NOT_FINITE.get(stored.dtype)
  try:
    for rows, block in stored.blocks(tensor.leaf.tile_rows):
      if bits is not None:
        words = block.view(f"uint{8 * block.itemsize}")
        if ((words & words.dtype.type(bits)) == bits).any():
          place = f"rows {rows.start}..{rows.stop - 1} of {tensor.name}"
          raise FolderError(folder.path, [f"{stored.file.name}: {place} are not all finite"])
      yield rows, block
  except OSError as error:
    problem = f"{stored.file.name}: cannot be read: {error.strerror}"
    raise FolderError(folder.path, [problem]) from None


def _place(out: np.ndarray, rows: slice, block: np.ndarray, leaf: Leaf) -> None:
  """Writes rows of a tensor to where the model's layout has them."""
  if leaf.layout == "kept":
    out[rows] = block
  elif leaf.layout == "transposed":
    out[:, rows] = block.T
  else:
    group, row = np.divmod(np.arange(rows.start, rows.stop), out.shape[-1])
    out[group, :, row] = block
