"""Fields of another family's config.json, checked as they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hysparse import config as config_lib

# Older names of the same fields.
_ALIASES = {
  "num_hidden_layers": ("n_layer",),
  "num_attention_heads": ("n_head",),
  "hidden_size": ("n_embd", "n_embed"),
  "max_position_embeddings": ("n_positions", "n_ctx", "seq_length"),
}


class Fields:
  """The object that describes a language model, inside or at the top of a config.json.

  Attributes:
    name: the file, for messages.
  """

  def __init__(self, values: Mapping[str, Any], name: str):
    self.name = name
    self._values = values

  def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
    """The same, with what it leaves out; null stays null."""
    return Fields({**defaults, **self._values}, self.name)

  def get(self, field: str, default: Any = None) -> Any:
    """Its value, under whichever of its names the file has it."""
    for name in (field, *_ALIASES.get(field, ())):
      if name in self._values:
        return self._values[name]
    return default

  def says(self, field: str) -> bool:
    """Whether the field is there, null or not."""
    return any(name in self._values for name in (field, *_ALIASES.get(field, ())))

  def flag(self, field: str, default: bool = False) -> bool:
    """
    Raises:
      ConfigError: neither true nor false.
    """
    value = self.get(field)
    if value is None:
      return default
    if not isinstance(value, bool):
      raise config_lib.ConfigError(f"{self.name}: {field}: is {value!r}; must be true or false")
    return value

  def count(self, field: str, *, default: int | None = None, least: int = 1) -> int:
    """A whole number; `default` where the field is missing or null.

    Raises:
      ConfigError: no number, or one that is too small.
    """
    value = self.get(field)
    if value is None:
      value = default
    if value is None:
      raise config_lib.ConfigError(f"{self.name}: {field}: is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise config_lib.ConfigError(
        f"{self.name}: {field}: is {value!r}; must be a whole number from {least} up"
      )
    return value

  def count_or_none(self, field: str) -> int | None:
    """The same; None where the field is missing or null."""
    return None if self.get(field) is None else self.count(field)
