"""Compiles one call for one chip and describes the result."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from hysparse_kernels import compat
from hysparse_kernels.aot import ptx
from hysparse_kernels.aot.targets import Target

# What a backend's kernels are called in a compiled program.
_CALLS = {
  "pallas_tpu": "tpu_custom_call",
  "pallas_gpu": "__gpu$xla.gpu.triton",
  "triton": "triton_kernel_call",
}
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"')
_LAUNCH = re.compile(r"kCustomKernel .*?([\w$.]+) grid: .*shared_memory: (\d+) bytes")
_NAME = re.compile(r'\bname = "([\w$.]+)"')
_SHARED = re.compile(r"([\w$.]+): shared_mem_bytes: (\d+)")


class CheckError(RuntimeError):
  """A program that compiles, but is not what was asked for or does not fit."""


@dataclasses.dataclass
class Report:
  """What a compiled call takes, in bytes.

  Attributes:
    arguments, outputs, temporaries: in the device's memory.
    kernels: calls of the backend's own kernels; 0 for xla.
    vmem: on-chip memory of the largest one (TPU).
    shared: of a thread block of the largest one (GPU; of all kernels for xla).
    registers, spilled: registers of a thread and its bytes for want of more, likewise.
  """

  arguments: int
  outputs: int
  temporaries: int
  kernels: int = 0
  vmem: int = 0
  shared: int = 0
  registers: int = 0
  spilled: int = 0


def compile_call(
  call: Callable, arrays: Any, target: Target, backend: str, kernel_dumps: pathlib.Path
) -> Report:
  """Compiles `call(arrays)`.

  Args:
    arrays: a pytree of arrays or of their shapes.
    backend: decides which kernels must be in the program.
    kernel_dumps: where jax-triton writes the kernels it compiles ($JAX_TRITON_DUMP_DIR).

  Raises:
    CheckError: a kernel is missing or does nothing, or the program needs more than there is.
    Exception: whatever the compilers raise.
  """
  device = target.device()
  here = jax.sharding.SingleDeviceSharding(device)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arrays)
  platforms = (compat.LOWERED[target.platform],)
  _forget(kernel_dumps)
  with target.tracing(device):
    lowered = jax.jit(call).trace(shapes).lower(lowering_platforms=platforms)
  with tempfile.TemporaryDirectory() as dumps:
    options = {"xla_dump_to": dumps} if target.platform == "gpu" else {}
    compiled = lowered.compile(compiler_options=options)
    written = [*pathlib.Path(dumps).iterdir(), *kernel_dumps.glob("*/*")]
    memory = compiled.memory_analysis()
    report = Report(
      memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    )
    program = compiled.as_text()
    own_kernels(report, program, backend)
    if target.platform == "gpu":
      gpu_kernels(report, program, written, backend, target)
  needed = report.arguments + report.outputs + report.temporaries
  if target.memory and needed > target.memory:
    raise CheckError(f"RESOURCE_EXHAUSTED: {needed:,} bytes of memory, there are {target.memory:,}")
  return report


def few_temporaries(report: Report, most: float) -> None:
  """
  Raises:
    CheckError: more temporary memory than a call of these sizes should need; something large is
      copied, turned or decoded as a whole.
  """
  if report.temporaries > most:
    raise CheckError(f"copies: {report.temporaries:,} temporary bytes, of at most {most:,.0f}")


def _forget(kernel_dumps: pathlib.Path) -> None:
  """jax-triton compiles a kernel once, and only then says what it takes."""
  if library := sys.modules.get("jax_triton.triton_lib"):
    library._COMPILED_KERNEL_CACHE.clear()
  for folder in kernel_dumps.iterdir():
    shutil.rmtree(folder)


def own_kernels(report: Report, program: str, backend: str) -> None:
  """Adds the backend's kernels in a compiled program to its report.

  Raises:
    CheckError: there is none, and the backend is made of kernels.
  """
  if backend not in _CALLS:
    return
  lines = _calls(program, backend)
  if not lines:
    raise CheckError(f"kernel missing: no '{_CALLS[backend]}' in the compiled program")
  report.kernels = len(lines)
  sizes = [int(size) for line in lines for size in _VMEM.findall(line)]
  report.vmem = max(sizes, default=0)


def _calls(program: str, backend: str) -> list[str]:
  return [line for line in program.splitlines() if f'"{_CALLS[backend]}"' in line]


def gpu_kernels(
  report: Report, program: str, written: list[pathlib.Path], backend: str, target: Target
) -> None:
  """Assembles a GPU program's kernels and adds what the largest one takes to its report.

  Args:
    written: files that the compilers left: assembly, and what is launched with how much memory.

  Raises:
    CheckError: a kernel does nothing or asks for too much shared memory.
  """
  shared = _launched(program, written, backend)
  for path in written:
    text = path.read_text() if path.suffix == ".ptx" else ""
    if ".entry" not in text:
      continue
    for kernel in ptx.kernels(text):
      if kernel.stub:
        raise CheckError(f"no kernel: {kernel.stub}")
    for name, use in ptx.assemble(text, "sm_90a").items():
      if name in shared:
        report.registers = max(report.registers, use.registers)
        report.spilled = max(report.spilled, use.spilled)
        report.shared = max(report.shared, shared[name] + use.shared)
  if report.shared > target.shared:
    raise CheckError(
      f"RESOURCE_EXHAUSTED: {report.shared:,} bytes of shared memory, there are {target.shared:,}"
    )


def _launched(program: str, written: list[pathlib.Path], backend: str) -> dict[str, int]:
  """Shared memory that each of the backend's own kernels is launched with, by its name."""
  suffix, pattern = ".thunk_sequence.txt", _LAUNCH
  if backend == "triton":
    suffix, pattern = ".compile_info", _SHARED
  found = {}
  for path in written:
    if path.name.endswith(suffix):
      found |= {name: int(size) for name, size in pattern.findall(path.read_text())}
  if backend == "pallas_gpu":
    own = {name for line in _calls(program, backend) for name in _NAME.findall(line)}
    found = {name: size for name, size in found.items() if re.sub(r"_\d+$", "", name) in own}
  return found
