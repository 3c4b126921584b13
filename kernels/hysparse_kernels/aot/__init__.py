"""Compiles operations for chips that are not here and says what they need of them.

`scripts/aot_check.py` runs it, in the environment that `scripts/aot/setup.sh` makes.
"""
