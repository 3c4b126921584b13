"""Any model by its path: a config of ours, a workdir, a released folder, another family's file."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from hysparse_kernels.arguments import whole

from hysparse import config as config_lib
from hysparse import config_file, json_text, published, published_fields, workdir
from hysparse.cache import layout as layout_lib
from hysparse.footprint import families, latent_families
from hysparse.footprint.entry_formats import FORMATS, OF_DTYPE, PLAIN
from hysparse.footprint.fields import Fields
from hysparse.footprint.kept import Kept, kept

Precision = str | Mapping[str, str] | layout_lib.Precision | None
Source = str | os.PathLike | config_lib.ModelConfig | config_lib.Config | Kept

_PAGE = 128  # tokens in a page, at least


def read(
  source: Source,
  *,
  precision: Precision = None,
  page: int | None = None,
  overrides: Sequence[str] = (),
) -> Kept:
  """What a model keeps.

  Args:
    source: a config object; a file of configs/; a workdir; a released folder; the config.json of
      any family counted here.
    precision: our models: one format for everything, {"main_kv": "fp8", ...} for some, or all of
      `layout.Precision`. Other families: a name of `entry_formats.FORMATS`. None: what the config
      says, or the family's engine does.
    page: tokens in a page of the cache.
    overrides: "model.field=value", of a file of configs/.

  Raises:
    ConfigError: a file that cannot be read, a family that is not known, a field, a format or a
      page that does not fit.
  """
  if page is not None:
    whole("page", page, error=config_lib.ConfigError)
  if isinstance(source, Kept):
    return _again(source, precision, page)
  if isinstance(source, config_lib.Config):
    source = source.model
  if isinstance(source, config_lib.ModelConfig):
    return _ours(source, "config", precision, page)
  if not isinstance(source, (str, os.PathLike)):
    raise config_lib.ConfigError(
      f"model: is a {type(source).__name__}; must be a path, a config of ours, or what `read` gave"
    )
  path = pathlib.Path(source)
  if path.suffix != ".json" and not path.is_dir():
    return _ours(config_file.load(str(path), overrides).model, path.stem, precision, page)
  if overrides:
    raise config_lib.ConfigError(f"config.{overrides[0]}: {path} takes no overrides")
  if (path / workdir.EXPERIMENT).is_file():
    return _ours(_recorded(path), path.name, precision, page)
  if path.is_dir():
    path = path / "config.json"
  values = _json(path)
  name = path.parent.name if path.name == "config.json" else path.stem
  if values.get("architectures") == [published_fields.ARCHITECTURE]:
    return _ours(published.from_published(values, name=str(path)), name, precision, page)
  return _foreign(values, str(path), name, precision, page)


def _again(model: Kept, precision: Precision, page: int | None) -> Kept:
  """A model that was read before, in other formats or pages if it is ours."""
  if precision is None and page is None:
    return model
  if model.config is None:
    raise config_lib.ConfigError(
      f"{'page' if precision is None else 'precision'}: {model.name} has been read as"
      f" {model.precision} in pages of {model.layout.block_tokens}; give its file instead"
    )
  dial = _dial(precision, model.dial)
  return kept(
    model.config,
    name=model.name,
    dial=dial,
    block_tokens=model.layout.block_tokens if page is None else page,
  )


def _ours(config: config_lib.ModelConfig, name: str, precision: Precision, page) -> Kept:
  dial = _dial(precision, layout_lib.Precision.of(config))
  return kept(config, name=name, dial=dial, block_tokens=page)


def _dial(precision: Precision, default: layout_lib.Precision) -> layout_lib.Precision:
  if precision is None:
    return default
  if isinstance(precision, layout_lib.Precision):
    return precision
  fields = default.__dict__
  if isinstance(precision, str):
    # The dial reaches plain keys and values in whole numbers of bytes a channel only.
    plain = precision if precision in ("bf16", "f32") else default.plain_kv
    precision = {**dict.fromkeys(fields, precision), "plain_kv": plain}
  if not isinstance(precision, Mapping):
    raise config_lib.ConfigError(
      f"precision: is {precision!r}; must be a format or formats by component"
    )
  for name, format in precision.items():
    if name not in fields:
      raise config_lib.ConfigError(f"precision: has {name!r}; formats are of {', '.join(fields)}")
    legal = ("bf16", "f32") if name == "plain_kv" else get_args(config_lib.Format)
    if format not in legal:
      raise config_lib.ConfigError(
        f"precision.{name}: is {format!r}; must be one of {', '.join(legal)}"
      )
  return layout_lib.Precision(**{**fields, **precision})


def _foreign(
  values: Mapping[str, Any], path: str, name: str, precision: Precision, page: int | None
) -> Kept:
  inner = values.get("text_config")
  text = inner if isinstance(inner, Mapping) else values
  family = text.get("model_type") or values.get("model_type")
  known = [*families.FAMILIES, *latent_families.FAMILIES]
  if not isinstance(family, str) or family not in known:
    raise config_lib.ConfigError(
      f"{path}: model_type: is {family!r} (architectures: {values.get('architectures')}); counted"
      f" are {published_fields.ARCHITECTURE}, {', '.join(sorted(known))}"
    )
  fields, own = Fields(text, path), _own_format(text, values, path)
  if family in families.FAMILIES:
    counted = families.FAMILIES[family]
    fields = fields.with_defaults(counted.defaults or {})
    format = _format(precision, own, PLAIN)
    found = families.components(counted, fields, format)
  else:
    count, default = latent_families.FAMILIES[family]
    format = _format(precision, default or own, tuple(FORMATS))
    found = count(fields, format)
  components, layers, head_channels = found
  ratios = [component.rows_per_token.denominator for component in components]
  alignment = math.lcm(*ratios)
  page = -(-_PAGE // alignment) * alignment if page is None else page
  if page % alignment:
    raise config_lib.ConfigError(f"page: is {page}; must be a multiple of {alignment}")
  return Kept(
    name=name,
    family=family,
    layout=layout_lib.StateLayout(tuple(components), page),
    layers=tuple(layers),
    head_channels=head_channels,
    precision=format.name,
    max_positions=fields.count_or_none("max_position_embeddings"),
  )


def _own_format(text: Mapping[str, Any], values: Mapping[str, Any], path: str) -> str:
  """Of the dtype that a file gives; bf16, as weights are published, where it gives none."""
  for where in (text, values):
    for field in ("torch_dtype", "dtype"):
      name = where.get(field)
      if name is not None:
        if not isinstance(name, str) or name not in OF_DTYPE:
          raise config_lib.ConfigError(
            f"{path}: {field}: is {name!r}; must be one of {', '.join(OF_DTYPE)}"
          )
        return OF_DTYPE[name]
  return "bf16"


def _format(precision: Precision, default: str, legal: Sequence[str]):
  name = default if precision is None else precision
  if not isinstance(name, str) or name not in legal:
    raise config_lib.ConfigError(f"precision: is {name!r}; must be one of {', '.join(legal)}")
  return FORMATS[name]


def _recorded(path: pathlib.Path) -> config_lib.ModelConfig:
  try:
    return config_lib.Config.from_dict(workdir.read_experiment(path)["config"]).model
  except workdir.WorkdirError as error:
    raise config_lib.ConfigError(str(error)) from None
  except config_lib.ConfigError as error:
    raise config_lib.ConfigError(f"{path / workdir.EXPERIMENT}: {error}") from None


def _json(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    values = json_text.parse(path.read_bytes())
  except (OSError, ValueError) as error:
    reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not JSON"
    raise config_lib.ConfigError(f"{path}: {reason}") from None
  if not isinstance(values, Mapping):
    raise config_lib.ConfigError(f"{path}: is not a config.json: no object at its top")
  return values
