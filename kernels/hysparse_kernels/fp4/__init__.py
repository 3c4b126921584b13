"""Quantising, packing and storing rows, and reading them back."""

from hysparse_kernels.fp4.api import append, pack, unpack

__all__ = ["append", "pack", "unpack"]
