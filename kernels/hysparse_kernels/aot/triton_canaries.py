"""Triton kernels that must not pass (canaries.py)."""

import triton
import triton.language as tl


@triton.jit
def squared(x, out, SIZE: tl.constexpr):
  """Both operands of a product are kept in shared memory, whatever their size."""
  at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None]
  rows = tl.load(x + at)
  tl.store(out + at, tl.dot(rows, rows))


@triton.jit
def undefined(x, out, SIZE: tl.constexpr):
  """Assumes what is never true: compilers empty such a kernel."""
  at = tl.arange(0, SIZE)
  tl.assume(tl.program_id(0) < 0)
  tl.store(out + at, tl.load(x + at))
