"""Nested mappings to dataclasses and back, types checked against the annotations of the fields."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
  """A field that is unknown, missing, of the wrong type or illegal; names the field and value."""


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
  """A dataclass from a mapping; `prefix` stands before the names in messages.

  Raises:
    ConfigError: an unknown key (with the nearest known one), a missing or illegal value.
  """
  if not isinstance(values, Mapping) and not hasattr(values, "items"):
    raise ConfigError(f"{prefix[:-1] or 'config'}: must be a group of fields, got {values!r}")
  hints = typing.get_type_hints(cls)
  known = {f.name: f for f in dataclasses.fields(cls)}
  arguments = {}
  for key, value in values.items():
    if key not in known:
      raise ConfigError(f"{prefix}{key}: unknown field; {_suggestion(cls, key, prefix, known)}")
    arguments[key] = convert(hints[key], value, prefix + key)
  for key, field in known.items():
    if key not in arguments and field.default is dataclasses.MISSING:
      raise ConfigError(f"{prefix}{key}: is missing")
  return cls(**arguments)


def convert(hint: Any, value: Any, name: str) -> Any:
  """Checks a value against the annotation of its field; ints pass as floats, lists as tuples.

  Raises:
    ConfigError: another type, naming the field and what would be legal.
  """
  if dataclasses.is_dataclass(hint):
    return value if isinstance(value, hint) else build(hint, value, name + ".")
  origin = typing.get_origin(hint)
  if origin is Literal:
    if value not in typing.get_args(hint):
      legal = ", ".join(repr(v) for v in typing.get_args(hint))
      raise ConfigError(f"{name}: is {value!r}; must be one of {legal}")
    return value
  if origin is tuple:
    if not isinstance(value, (list, tuple)) and type(value).__name__ != "ConfigDict":
      raise ConfigError(f"{name}: is {value!r}; must be a sequence of whole numbers")
    return tuple(convert(typing.get_args(hint)[0], v, name) for v in value)
  if origin is types.UnionType:
    raise TypeError(f"{name}: optional fields are not used in configs")
  if hint is float and type(value) in (int, float):
    if not math.isfinite(value):
      raise ConfigError(f"{name}: is {value!r}; must be finite")
    return float(value)
  if type(value) is not hint:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    raise ConfigError(f"{name}: is {value!r}; must be {words[hint]}")
  return value


def plain(value: Any) -> Any:
  """The same with tuples as lists, JSON-ready."""
  if isinstance(value, dict):
    return {k: plain(v) for k, v in value.items()}
  return [plain(v) for v in value] if isinstance(value, tuple) else value


def _suggestion(cls: type, key: str, prefix: str, known: Mapping[str, dataclasses.Field]) -> str:
  """The nearest known field; of groups also the one that a forgotten prefix names."""
  groups = {g: c for g, c in typing.get_type_hints(cls).items() if dataclasses.is_dataclass(c)}
  homes = [g for g, c in groups.items() if key in {f.name for f in dataclasses.fields(c)}]
  if homes:
    return f"did you mean {prefix}{homes[0]}.{key}?"
  near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
  return f"did you mean {prefix}{near[0]}?"
