"""Attention state: what it is made of, in which formats, and how long it lives."""
