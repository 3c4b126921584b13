"""Triton kernels on NumPy arrays, through Triton's interpreter.

The interpreter wants tensors with a small part of torch's interface, which `_Tensor` has. Import
kernels under `interpreted()`: Triton decides when a function is decorated (its own ones, too, so
before anything else imports it).
"""

import contextlib
import functools
import os
from unittest import mock

import jax
import numpy as np


@contextlib.contextmanager
def interpreted():
  """Kernels decorated inside run in the interpreter; nothing else notices, subprocesses neither."""
  old = os.environ.get("TRITON_INTERPRET")
  os.environ["TRITON_INTERPRET"] = "1"
  try:
    yield
  finally:
    if old is None:
      del os.environ["TRITON_INTERPRET"]
    else:
      os.environ["TRITON_INTERPRET"] = old


class _Tensor:
  """A contiguous array, its own storage, on a device that is already the host."""

  def __init__(self, array: np.ndarray):
    self.array = array
    self.dtype = str(array.dtype)

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  cpu = untyped_storage

  def new_empty(self, *_, **__):
    return _Tensor(self.array[:0])

  def set_(self, storage, *_):
    self.array = storage.array

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return self.array.strides

  def copy_(self, _):
    pass


def results(launch, *arrays):
  """What a launch (`triton_launch.Launch`) fills, starting from garbage.

  Args:
    arrays: instead of the launch's own.
  """
  arrays = [np.ascontiguousarray(a) for a in arrays or launch.arrays]
  filled = [np.full(r.shape, 77, r.dtype) for r in launch.results]
  tensors = [_Tensor(a) for a in arrays + filled]
  with (
    interpreted(),
    _patched_once(),
    np.errstate(all="ignore"),  # infinities are part of an online softmax
  ):
    launch.kernel[launch.grid](*tensors, **launch.constants)
  return tuple(filled)


def _patched_once():
  """Without this, triton.language is replaced anew at each call inside a kernel: half the time."""
  from triton.runtime import interpreter

  replace, scopes = interpreter._patch_lang, {}

  def once(function):
    module = id(function.__globals__)
    if module not in scopes:
      scopes[module] = replace(function)
    return scopes[module]

  return mock.patch.object(interpreter, "_patch_lang", once)


def run(launch):
  """`triton_launch.run`, also where it is traced."""
  call = functools.partial(results, launch)
  return jax.pure_callback(call, tuple(launch.results), *launch.arrays)
