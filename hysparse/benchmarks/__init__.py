"""Yardsticks: one file per benchmark, each measured beside its floor or peer in the same run."""

# What benchmarks use; every other module here is one.
TOOLS = ("cached", "device_kernels", "peer", "timing", "yardsticks")
