"""Scores compressed entries with small keys and selects the best; builds and obeys the pool."""

from hysparse_kernels.indexer.api import Pool, Selection, score_rows, select

__all__ = ["Pool", "Selection", "score_rows", "select"]
