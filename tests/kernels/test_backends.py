"""Every kernel against the plain definition, run step by step, and lowered for its platform.

What the kernels compile to is checked by `scripts/aot_check.py`.
"""

import functools

import jax
import numpy as np
import pytest
from comparing import close
from hysparse_kernels import compat
from hysparse_kernels.catalogue import OPERATIONS, separated

PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
# Of the specs, these are run every day; all are lowered every day.
EVERY_DAY = ("odd_sizes", "one_token", "packed_one_token", "paged", "ties", "fp8", "bfloat16")


def cases(platforms, every_day=None):
  return list(_cases(platforms, every_day))


def _cases(platforms, every_day):
  for name, op in OPERATIONS.items():
    for backend in op.backends:
      for platform in platforms(backend):
        for spec in op.specs:
          label = f"{name}-{backend}-{spec.name}-{platform}"
          slow = every_day is not None and spec.name not in every_day
          marks = pytest.mark.slow if slow else ()
          yield pytest.param(name, backend, platform, spec, id=label, marks=marks)


def own_platform(backend):
  return [PLATFORM[backend]] if backend in PLATFORM else []


def lowered_for(backend):
  return ["tpu", "gpu"] if backend in ("xla", "ragged_dot") else own_platform(backend)


def call_of(name, backend, arguments):
  """A call as a function of its arrays, and the arrays or their shapes."""
  arrays, rest = separated(arguments)
  return lambda arrays: OPERATIONS[name].call(arrays | rest, backend), arrays


@functools.cache
def reference(name, spec):
  call, arrays = call_of(name, "reference", spec.arguments())
  return jax.jit(call)(arrays)


def same(got, want):
  """The same bits; any NaN is like another."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape and got.dtype == want.dtype
  nan = np.isnan(want.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
  bits = f"uint{8 * got.itemsize}"
  np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@pytest.mark.parametrize(("name", "backend", "platform", "spec"), cases(own_platform, EVERY_DAY))
def test_a_kernel_equals_the_reference(name, backend, platform, spec):
  call, arrays = call_of(name, backend, spec.arguments())
  with compat.target(platform, interpret=True):
    got = jax.jit(call)(arrays)
  jax.tree.map(same if OPERATIONS[name].exact else close, got, reference(name, spec))


@pytest.mark.parametrize(("name", "backend", "platform", "spec"), cases(lowered_for))
def test_it_lowers(name, backend, platform, spec):
  call, arrays = call_of(name, backend, spec.shapes())
  assert compat.lower(call, arrays, platform=platform).as_text()
