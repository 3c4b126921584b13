"""Yardsticks: one file per benchmark, each measured beside its floor or peer in the same run."""

TOOLS = (
  "cached",
  "peer",
  "timing",
  "yardsticks",
)  # what benchmarks use; every other module here is one
