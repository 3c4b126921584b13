"""Compiles calls with one backend for one chip, in a process of its own.

    python -m hysparse_kernels.aot.worker TARGET BACKEND [OP/SPEC ...]

SPEC is a spec's name, or that name and "+gradient" for the gradient by all its float arguments.

A compiler that meets what it does not know may end the process, so each result is a line of JSON of
its own, after one that names what is tried.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hysparse_kernels.aot.canaries import CANARIES
from hysparse_kernels.aot.compiled import compile_call, few_temporaries
from hysparse_kernels.aot.targets import TARGETS
from hysparse_kernels.catalogue import OPERATIONS, separated

GRADIENT = "+gradient"


def main(target: str, backend: str, *cases: str) -> None:
  say = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # results alone; compilers print, too
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  jax.config.update("jax_platforms", "cpu")  # a device that is here is left alone
  with tempfile.TemporaryDirectory() as dumps:
    os.environ["JAX_TRITON_DUMP_DIR"] = dumps  # read when jax_triton is imported
    for case in cases:
      print(json.dumps({"case": case}), file=say, flush=True)
      begin = _processor_seconds()
      try:
        found: dict[str, Any] = _compile(target, backend, case, pathlib.Path(dumps))
      except Exception as problem:  # a compiler's, of any kind
        found = {"failure": _summary(problem)}
      found["seconds"] = round(_processor_seconds() - begin, 1)
      print(json.dumps({"case": case, **found}), file=say, flush=True)


def _compile(target: str, backend: str, case: str, dumps: pathlib.Path) -> dict:
  op, _, spec = case.partition("/")
  operation = (OPERATIONS | CANARIES)[op]
  name, differentiated, _ = spec.partition(GRADIENT)
  spec = next(spec for spec in (*operation.specs, *operation.released) if spec.name == name)
  arrays, rest = separated(getattr(spec, "shapes", spec.arguments)())
  call = lambda arrays: operation.call(arrays | rest, backend)  # noqa: E731
  if differentiated:
    call = gradient(call)
  report = compile_call(call, arrays, TARGETS[target], backend, dumps)
  few_temporaries(report, getattr(spec, "most_temporaries", math.inf))
  return dataclasses.asdict(report)


def gradient(call: Callable) -> Callable:
  """The gradient of the sum of a call's float results by all its float arguments."""

  def differentiate(arrays):
    leaves, tree = jax.tree.flatten(arrays)

    def total(changed):
      changed = iter(changed)
      mixed = [next(changed) if _is_float(leaf) else leaf for leaf in leaves]
      results = jax.tree.leaves(call(tree.unflatten(mixed)))
      return sum(x.astype(jnp.float32).sum() for x in results if _is_float(x))

    return jax.grad(total)([leaf for leaf in leaves if _is_float(leaf)])

  return differentiate


def _is_float(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact)


def _processor_seconds() -> float:
  """Unlike those on the wall, about the same whatever else the machine does."""
  return sum(os.times()[:4])


def _summary(problem: Exception) -> str:
  text = " ".join(str(problem).split())  # compilers put the figures on later lines
  return f"{type(problem).__name__}: {text or 'no message'}"[:400]


if __name__ == "__main__":
  main(*sys.argv[1:])
