"""Fields of another family's config.json, checked as they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hysparse import config as config_lib


class Fields:
  """The object that describes a language model, inside or at the top of a config.json.

  Attributes:
    name: the file, for messages.
  """

  def __init__(self, values: Mapping[str, Any], name: str):
    self.name = name
    self._values = values

  def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
    """The same, with what it leaves out (or sets to null where the default is no choice)."""
    return Fields({**defaults, **self._values}, self.name)

  def get(self, field: str, default: Any = None) -> Any:
    return self._values.get(field, default)

  def count(self, field: str, *, default: int | None = None, least: int = 1) -> int:
    """A whole number; `default` where the field is missing or null.

    Raises:
      ConfigError: no number, or one that is too small.
    """
    value = self._values.get(field)
    if value is None:
      value = default
    if value is None:
      raise config_lib.ConfigError(f"{self.name}: {field}: is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise config_lib.ConfigError(
        f"{self.name}: {field}: is {value!r}; must be a whole number from {least} up"
      )
    return value
