"""Every kernel against the plain definition, run step by step, and lowered for its platform.

What the kernels compile to is checked by `scripts/aot_check.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels import compat
from hysparse_kernels.catalogue import OPERATIONS
from hysparse_kernels.tuner import split

# A few hundred float32 products, in another order, of values around 1.
TOLERANCE = 5e-6
# One rounding of bfloat16 more or less.
BFLOAT16_TOLERANCE = 2**-7

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


def separated(name, backend, arguments):
  """A call as a function of its arrays, and the arrays or their shapes."""
  arrays, rest = split(arguments)
  return lambda arrays: OPERATIONS[name].call(arrays | rest, backend), arrays


@functools.cache
def reference(name, spec):
  call, arrays = separated(name, "reference", spec.arguments())
  return jax.jit(call)(arrays)


def close(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape and got.dtype == want.dtype
  if not jnp.issubdtype(want.dtype, jnp.floating):
    np.testing.assert_array_equal(got, want)
    return
  tolerance = TOLERANCE if want.dtype == np.float32 else BFLOAT16_TOLERANCE
  finite = np.abs(want[np.isfinite(want)].astype(np.float32))
  scale = max(1.0, finite.max(initial=0.0))
  np.testing.assert_allclose(
    got.astype(np.float32), want.astype(np.float32), atol=tolerance * scale, rtol=0
  )


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
  call, arrays = separated(name, backend, spec.arguments())
  with compat.target(platform, interpret=True):
    got = jax.jit(call)(arrays)
  jax.tree.map(same if OPERATIONS[name].exact else close, got, reference(name, spec))


@pytest.mark.parametrize(("name", "backend", "platform", "spec"), cases(lowered_for))
def test_it_lowers(name, backend, platform, spec):
  call, arrays = separated(name, backend, spec.shapes())
  assert compat.lower(call, arrays, platform=platform).as_text()
