"""Compiled programs of a file are dropped behind it: parity compiles hundreds of large ones."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file():
  yield
  jax.clear_caches()
