"""Notebooks that compile a model are slow tests."""

import pytest

_COMPILE = ("03", "04")


def pytest_collection_modifyitems(items):
  for item in items:
    if item.path.suffix == ".ipynb" and item.path.name.startswith(_COMPILE):
      item.add_marker(pytest.mark.slow)
