"""Yardsticks: one file per benchmark, each measured beside its floor or peer in the same run."""
