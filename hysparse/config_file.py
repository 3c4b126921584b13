"""Reads `configs/<name>.py` and applies overrides such as `model.top_k=64`.

    --config=configs/tiny.py --config.model.top_k=64 --config.model.main_kv=bf16

Every field of the dataclasses in `config.py` can be overridden, whether or not the file sets it.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from hysparse import config as config_lib

_OVERRIDE = re.compile(r"--?config\.([A-Za-z0-9_.]+)=(.*)", re.DOTALL)


def load(path: str, overrides: Sequence[str] = ()) -> config_lib.Config:
  """The validated config of a file.

  Args:
    path: a Python file with `get_config()`.
    overrides: "group.field=value" each.

  Raises:
    ConfigError: no such file, a file without `get_config`, an unknown or illegal field.
  """
  values = _get_config(path)
  for text in overrides:
    _apply(values, text)
  return config_lib.Config.from_dict(values)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates a command line into (everything else, overrides without their `--config.`)."""
  matches = [(argument, _OVERRIDE.fullmatch(argument)) for argument in argv]
  rest = [argument for argument, match in matches if not match]
  return rest, [f"{match[1]}={match[2]}" for _, match in matches if match]


def _get_config(path: str) -> dict[str, Any]:
  if not pathlib.Path(path).is_file():
    raise config_lib.ConfigError(f"config: no such file: {path}")
  if not path.endswith(".py"):
    raise config_lib.ConfigError(f"config: {path} is not a Python file with get_config()")
  spec = importlib.util.spec_from_file_location("hysparse_config_file", path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
      raise config_lib.ConfigError(f"config: {path} has no get_config()")
    values = module.get_config()
  except SyntaxError as error:
    raise config_lib.ConfigError(f"config: {path}:{error.lineno}: {error.msg}") from None
  except config_lib.ConfigError:
    raise
  except Exception as error:  # the file is the user's code: whatever it raises, one line
    raise config_lib.ConfigError(f"config: {path}: {type(error).__name__}: {error}") from None
  if hasattr(values, "to_dict"):
    return values.to_dict()
  if not isinstance(values, dict):
    raise config_lib.ConfigError(
      f"config: {path}: get_config() returns {values!r}; must be a ConfigDict or a dictionary"
    )
  return values


def _apply(values: dict[str, Any], text: str) -> None:
  """Sets one field; names and values are checked by `Config.from_dict` afterwards."""
  path, _, value = text.partition("=")
  *groups, field = path.split(".")
  for group in groups:
    values = values.setdefault(group, {})
    if not isinstance(values, dict):
      raise config_lib.ConfigError(f"{path}: '{group}' is a field, not a group of fields")
  values[field] = _literal(value)


def _literal(text: str) -> Any:
  """A Python literal where the text is one ("64", "(1, 14)", "true"), else the text itself."""
  try:
    return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
  except (SyntaxError, ValueError):
    return text
