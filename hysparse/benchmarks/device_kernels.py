"""Every operation and backend on an accelerator at the released sizes, beside the chip's rates.

Decode attention is compared with a copy in device memory, by the bytes that it must read; prefill
attention with the rate of a bfloat16 matrix product, by its FLOPs; and every backend's result with
that of xla. Under four minutes on one GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hysparse_kernels import dispatch
from hysparse_kernels.catalogue import OPERATIONS, Operation, separated

from hysparse.benchmarks.timing import interleaved

DECODE_BATCH = 256  # sequences: enough bytes for a rate
_COPIED = 2**28  # float32 values
_MATRIX = 8192


@dataclasses.dataclass(frozen=True)
class Row:
  """One backend on one spec.

  Attributes:
    error: largest difference from xla's result, relative to its largest value; None for xla.
    share: of the copy's bytes per second, or of the product's FLOPs; None where neither is meant.
    failure: why it did not run, in one line.
  """

  op: str
  spec: str
  backend: str
  seconds: float | None = None
  error: float | None = None
  share: float | None = None
  failure: str = ""

  def __str__(self) -> str:
    name = f"{self.op:32} {self.spec:22} {self.backend:11}"
    if self.seconds is None:
      return f"{name} {self.failure}"
    error = "" if self.error is None else f"  differs by {self.error:.1e}"
    share = "" if self.share is None else f"  {self.share:6.1%} of the chip's rate"
    return f"{name} {1e3 * self.seconds:10.3f} ms{error}{share}"


@dataclasses.dataclass(frozen=True)
class Result:
  """All rows, and the chip's own rates in the same run."""

  device: str
  copied_per_s: float  # bytes read and written
  flops_per_s: float  # bfloat16 product
  rows: tuple[Row, ...]

  def __str__(self) -> str:
    rates = f"copy {self.copied_per_s / 1e9:,.0f} GB/s, product {self.flops_per_s / 1e12:,.1f} TF/s"
    return "\n".join([f"{self.device}: {rates}", *map(str, self.rows)])

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def run(rounds: int = 7) -> Result:
  """Everything that runs here; a backend that fails has a row that says so."""
  x = jnp.zeros(_COPIED, jnp.float32)
  m = jnp.ones((_MATRIX, _MATRIX), jnp.bfloat16)
  copy, product = jax.jit(lambda x: x + 1), jax.jit(lambda m: m @ m)
  seconds = interleaved({"copy": lambda: copy(x), "product": lambda: product(m)}, rounds)
  copied, flops = 2 * x.nbytes / seconds["copy"], 2.0 * _MATRIX**3 / seconds["product"]
  rows = [
    row for name in OPERATIONS for row in _rows(name, OPERATIONS[name], rounds, copied, flops)
  ]
  return Result(jax.devices()[0].device_kind, copied, flops, tuple(rows))


def _rows(name: str, op: Operation, rounds: int, copied: float, flops: float) -> Iterator[Row]:
  for spec in (spec for spec in op.released if spec.name in op.timed):
    if name == "sparse_attention" and spec.name == "released_decode":
      spec = dataclasses.replace(spec, batch=DECODE_BATCH)
    arrays, rest = separated(spec.arguments())
    wanted = _rate_of(name, spec, copied, flops)
    results = {}
    for backend in ("xla", *(b for b in dispatch.here(op.backends) if b != "xla")):
      call = jax.jit(lambda a, rest=rest, backend=backend: op.call(a | rest, backend))
      try:
        results[backend] = jax.device_get(call(arrays))
      except Exception as error:  # a compiler's or a driver's, of any kind
        summary = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        yield Row(name, spec.name, backend, failure=summary)
        continue
      seconds = interleaved({backend: lambda call=call, arrays=arrays: call(arrays)}, rounds)[
        backend
      ]
      error = None if backend == "xla" else _difference(results[backend], results["xla"])
      yield Row(name, spec.name, backend, seconds, error, wanted and wanted / seconds)


def _rate_of(name: str, spec: Any, copied: float, flops: float) -> float | None:
  """Seconds that the chip's rate alone would take."""
  if name != "sparse_attention":
    return None
  keys = spec.top_k + spec.window
  if spec.queries == 1:
    view = spec.shapes()["view"]
    row = lambda rows: sum(part.shape[-1] for part in rows.parts.values())  # noqa: E731
    read = spec.batch * (spec.top_k * row(view.entries) + spec.window * row(view.window))
    return read / copied
  return 4.0 * spec.batch * spec.queries * spec.heads * keys * spec.channels / flops


def _difference(got: Any, want: Any) -> float:
  """Largest difference relative to the largest value; of integers, the share that differs."""
  worst = 0.0
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    if jnp.issubdtype(b.dtype, jnp.floating):
      a, b = a.astype(np.float64), b.astype(np.float64)
      finite = np.isfinite(b)
      if (np.isfinite(a) != finite).any():
        return math.inf
      scale = max(np.abs(b[finite]).max(initial=0.0), 1e-30)
      worst = max(worst, np.abs(a[finite] - b[finite]).max(initial=0.0) / scale)
    else:
      worst = max(worst, float((a != b).mean()))
  return worst
