"""Calls that must not pass. They are compiled, too: a check that does not see them fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from hysparse_kernels import triton_launch
from hysparse_kernels.catalogue import Operation


@dataclasses.dataclass(frozen=True)
class Spec:
  """An array to call with."""

  name: str
  shape: tuple[int, ...] = (128,)
  dtype: str = "int32"

  def arguments(self) -> dict[str, Any]:
    return {"x": jnp.zeros(self.shape, self.dtype)}


def _undefined(x_ref, out_ref):
  """Divides by zero before it decides whether to write: compilers empty such a kernel."""

  @pl.when(jax.lax.div(x_ref[0], jnp.int32(0)) > 0)
  def _():
    out_ref[...] = x_ref[...]


def _squared(x_ref, out_ref):
  """Both operands of a product are kept in shared memory, whatever their size."""
  out_ref[...] = plgpu.dot(x_ref[...], x_ref[...])


def _copied(x_ref, out_ref, scratch_ref):
  scratch_ref[:8] = jnp.broadcast_to(x_ref[...], (8, 128))
  out_ref[...] = scratch_ref[0]


def _gpu(body: Callable) -> Callable:
  def call(x: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, compiler_params=plgpu.CompilerParams())(x)

  return call


def _triton(name: str) -> Callable:
  def call(x: jax.Array) -> jax.Array:
    from hysparse_kernels.aot import triton_canaries  # triton is not everywhere

    kernel = getattr(triton_canaries, name)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    launch = triton_launch.Launch(kernel, (x,), (shape,), (1,), {"SIZE": x.shape[0]}, 4, 2)
    return triton_launch.run(launch)[0]

  return call


def _too_large_for_a_tpu(x: jax.Array) -> jax.Array:
  return pl.pallas_call(
    _copied,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    scratch_shapes=[pltpu.VMEM((2**19, 128), x.dtype)],  # 256 MiB
    compiler_params=pltpu.CompilerParams(),
  )(x)


def _no_kernel(x: jax.Array) -> jax.Array:
  return x + 1


def _operation(spec: Spec, **backends: Callable) -> Operation:
  call = lambda arguments, backend: backends[backend](**arguments)  # noqa: E731
  return Operation(call, (spec,), backends, compiled=(spec.name,))


_SMALL, _LARGE = Spec("canary"), Spec("canary", (256, 256), "float32")
CANARIES = {
  "stub": _operation(_SMALL, pallas_gpu=_gpu(_undefined), triton=_triton("undefined")),
  "missing": _operation(_SMALL, pallas_gpu=_no_kernel, pallas_tpu=_no_kernel, triton=_no_kernel),
  "too_large": _operation(_LARGE, pallas_gpu=_gpu(_squared), triton=_triton("squared")),
  "too_large_for_a_tpu": _operation(_SMALL, pallas_tpu=_too_large_for_a_tpu),
}

# What the failure of each says.
EXPECTED = {
  "stub": "no kernel",
  "missing": "kernel missing",
  "too_large": "RESOURCE_EXHAUSTED",
  "too_large_for_a_tpu": "RESOURCE_EXHAUSTED",
}
