"""Engram: n-grams of recent token ids hashed to rows of a table, and the gate that admits them."""

from hysparse_kernels.engram.api import gate
from hysparse_kernels.engram.hash import hash_rows
from hysparse_kernels.engram.reference import openings
from hysparse_kernels.engram.tables import HashConstants, hash_constants

__all__ = ["HashConstants", "gate", "hash_constants", "hash_rows", "openings"]
