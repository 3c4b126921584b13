"""Attention to all visible entries, and the oracle selection made from its probabilities."""

from hysparse_kernels.dense_attention.api import dense_attention, merge, oracle_top_k

__all__ = ["dense_attention", "merge", "oracle_top_k"]
