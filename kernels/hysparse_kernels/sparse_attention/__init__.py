"""Attention of each query to its window and to the entries selected for it."""

from hysparse_kernels.sparse_attention.api import sparse_attention
from hysparse_kernels.sparse_attention.view import Attended, View

__all__ = ["Attended", "View", "sparse_attention"]
