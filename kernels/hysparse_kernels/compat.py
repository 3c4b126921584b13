"""Differences between jax versions and platforms, in one place (jax 0.10.2 to 0.12)."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

Platform = Literal["cpu", "gpu", "tpu"]
LOWERED = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # the compiler's names


@dataclasses.dataclass(frozen=True)
class _Target:
  platform: Platform
  interpret: bool
  device_kind: str


_target: contextvars.ContextVar[_Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target(platform: Platform, *, interpret: bool = False, device_kind: str = "") -> Iterator[None]:
  """Traces what is called inside for another platform than the default one.

  What is jitted inside must not have been traced before: compiled functions do not know of this.

  Args:
    interpret: kernels run step by step on the default platform instead, for tests.
    device_kind: of the chip; empty: any.
  """
  token = _target.set(_Target(platform, interpret, device_kind))
  try:
    yield
  finally:
    _target.reset(token)


def platform() -> Platform:
  """Where the operations being traced will run."""
  if asked := _target.get():
    return asked.platform
  name = jax.default_backend()
  return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def device_kind() -> str:
  """The chip that the operations being traced will run on; empty: not known."""
  if asked := _target.get():
    return asked.device_kind
  return jax.devices()[0].device_kind


def interpret() -> bool:
  """Whether kernels are run step by step on the default platform."""
  asked = _target.get()
  return asked is not None and asked.interpret


def widened(*operands: jax.Array) -> tuple[jax.Array, ...]:
  """Operands of a product that accumulates in float32.

  XLA on CPU has no bfloat16 x bfloat16 -> float32 dot for every layout (it fails at run time, not
  when compiling), so there they become float32; elsewhere they keep their width.
  """
  if platform() == "cpu" or interpret():
    return tuple(x.astype(jnp.float32) for x in operands)
  return operands


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
  """An einsum with a float32 result and float32 accumulation, whatever the operands are."""
  return jnp.einsum(spec, *widened(*operands), preferred_element_type=jnp.float32)


def lower(function: Callable, *arguments: Any, platform: Platform) -> jax.stages.Lowered:
  """Lowers a call for a platform that need not be here, as far as jax goes without its compiler."""
  # From jax 0.12 on, Pallas lowers for a GPU that is not here only if it is told which.
  is_gpu = platform == "gpu"
  chip = described("NVIDIA H100 80GB HBM3", 132, "cuda") if is_gpu else contextlib.nullcontext()
  with target(platform), chip:
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=(LOWERED[platform],))


def described(
  device_kind: str, num_cores: int | None, platform: str
) -> contextlib.AbstractContextManager:
  """Tells jax of the chip that what is traced inside is lowered for."""
  chip = jax.sharding.AbstractDevice(device_kind, num_cores=num_cores, platform=platform)
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip))


def triton_call(*arrays: jax.Array, results: tuple[jax.ShapeDtypeStruct, ...], **options: Any):
  """`jax_triton.triton_call` of jax-triton 0.3 or 0.4, for drivers from CUDA 12.9 on.

  Raises:
    ImportError: jax-triton is missing, or has no GPU where it needs one.
  """
  import jax_triton
  import triton
  from jax._src.interpreters import partial_eval
  from jax_triton import triton_lib

  # Its own rule for dead code has another signature than jax 0.12 wants; the default one serves.
  partial_eval.dce_rules.pop(triton_lib.triton_kernel_call_p, None)
  # Left alone, Triton 3.9 emits PTX 9.4 on Hopper: that of the newest assembler it brings along.
  if "backend_options" in inspect.signature(jax_triton.triton_call).parameters:
    backend_options = {"ptx_version": 88, "enable_fp_fusion": True}
    options |= {"out_type": results, "backend_options": backend_options}
  else:
    triton.knobs.nvidia.ptxas_blackwell = triton.knobs.nvidia.ptxas.path
    options |= {"out_shape": results}
  return jax_triton.triton_call(*arrays, **options)
