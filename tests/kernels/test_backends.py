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

# A few hundred float32 products, in another order, of values around 1.
TOLERANCE = 5e-6
# One rounding of bfloat16 more or less.
BFLOAT16_TOLERANCE = 2**-7

PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


def cases(platforms):
  return list(_cases(platforms))


def _cases(platforms):
  for name, op in OPERATIONS.items():
    for backend in op.backends:
      for platform in platforms(backend):
        for spec in op.specs:
          label = f"{name}-{backend}-{spec.name}-{platform}"
          yield pytest.param(name, backend, platform, spec, id=label)


def own_platform(backend):
  return [PLATFORM[backend]] if backend in PLATFORM else []


def lowered_for(backend):
  return ["tpu", "gpu"] if backend == "xla" else own_platform(backend)


def separated(name, backend, spec):
  """A call as a function of its arrays, and the arrays."""
  arrays, rest = {}, {}
  for key, value in spec.arguments().items():
    is_data = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
    (arrays if is_data else rest)[key] = value
  return lambda arrays: OPERATIONS[name].call(arrays | rest, backend), arrays


@functools.cache
def reference(name, spec):
  call, arrays = separated(name, "reference", spec)
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


@pytest.mark.parametrize(("name", "backend", "platform", "spec"), cases(own_platform))
def test_a_kernel_equals_the_reference(name, backend, platform, spec):
  call, arrays = separated(name, backend, spec)
  with compat.target(platform, interpret=True):
    got = jax.jit(call)(arrays)
  jax.tree.map(same if OPERATIONS[name].exact else close, got, reference(name, spec))


@pytest.mark.parametrize(("name", "backend", "platform", "spec"), cases(lowered_for))
def test_it_lowers(name, backend, platform, spec):
  call, arrays = separated(name, backend, spec)
  assert compat.lower(call, arrays, platform=platform).as_text()
