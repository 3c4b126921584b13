"""Freed buffers go back to the system.

The GNU C library takes large buffers from the system and gives them back, until one is freed: from
then on it keeps buffers of that size, up to 32 MB, for the thread that freed them. TensorStore
copies chunks in tens of threads, so a conversion would keep tens of chunks that nobody uses.
"""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # mallopt(3): its parameter M_MMAP_THRESHOLD
_LARGE_BYTES = 1 << 18


def return_freed_buffers() -> None:
  """From now on, in the whole process. Does nothing where the C library is not the GNU one."""
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is not None:
    mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)  # setting it also stops its adaptation
