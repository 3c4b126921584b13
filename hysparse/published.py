"""A released config.json and `ModelConfig`, both ways.

Only what this project can build is accepted; everything wrong with a file is reported at once, in
one line. `candidate_source_layer_id` -1, `swiglu_limit` 0, `engram_layer_ids` [], `rope_scaling`
null, `num_nextn_predict_layers` 0 and a missing `vision_config` each switch a mechanism off, and
the fields of that mechanism are then not read (writers leave anything in them). Fields that nobody
here knows are ignored.

Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import copy
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, Literal

from hysparse import config as config_lib
from hysparse import config_fields, json_text, published_schedule
from hysparse import published_fields as names
from hysparse import schedule as schedule_lib

_TYPES = typing.get_type_hints(config_lib.ModelConfig)


def read(path: str) -> config_lib.ModelConfig:
  """The model of a released config.json.

  Raises:
    ConfigError: an unreadable file, an unknown architecture, or all problems of its fields.
  """
  try:
    values = json_text.parse(pathlib.Path(path).read_bytes())
  except OSError as error:
    raise config_lib.ConfigError(f"{path}: cannot be read: {error.strerror}") from None
  except ValueError as error:
    raise config_lib.ConfigError(f"{path}: is not JSON: {error}") from None
  return from_published(values, name=path)


def from_published(
  values: Mapping[str, Any],
  *,
  name: str = "config.json",
  decoder_start: int | Literal["auto"] | None = "auto",
) -> config_lib.ModelConfig:
  """The model that the contents of a released config.json describe.

  "As the backbone" (0) and "all ids" (0) are written out. A file without `quantization_config` is
  taken to mean the released encoding: whoever reads the weights finds out if it does not hold.
  `engram_num_embeddings` is compared with the hash elsewhere, see `engram_rows_problem`.

  Args:
    values: the parsed file.
    name: the file, for messages.
    decoder_start: see `published_schedule.from_published`; the bar is not a published field.

  Raises:
    ConfigError: an unknown architecture, or all problems of its fields.
  """
  if not isinstance(values, Mapping):
    raise config_lib.ConfigError(f"{name}: is not a config.json: no object at its top")
  architectures = values.get("architectures")
  if architectures != [names.ARCHITECTURE]:
    named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
    raise config_lib.ConfigError(
      f"{name}: architecture {named}; only {names.ARCHITECTURE} can be read"
    )
  if not isinstance(values.get("text_config"), Mapping):
    raise config_lib.ConfigError(f"{name}: text_config: is missing")
  reader = _Reader(values)
  fields = _fields(_Reader(values["text_config"], problems=reader.problems), decoder_start)
  fields |= _vision(reader)
  if values.get("quantization_config") is not None:
    reader.inside("quantization_config").check(names.ENCODING)
  if not reader.problems:
    try:
      return config_lib.ModelConfig(**fields)
    except config_lib.ConfigError as error:
      reader.problems.append(_in_published_words(str(error)))
  raise config_lib.ConfigError(f"{name}: " + "; ".join(reader.problems))


def engram_rows_problem(values: Mapping[str, Any], config: config_lib.ModelConfig) -> str | None:
  """Where the table sizes of a config.json are not those that its hash addresses, or None.

  Apart from `from_published` because the hash needs jax, for which counting must not wait.

  Args:
    values: the parsed file, which `from_published` accepts.
    config: what it gave.
  """
  from hysparse.parameters import engram_rows  # here for the same reason

  try:
    rows = list(engram_rows(config))
  except config_lib.ConfigError as error:
    return _in_published_words(str(error))
  listed = list(values["text_config"].get("engram_num_embeddings") or ())
  if not rows or listed == rows:
    return None
  return f"engram_num_embeddings: is {listed}; the hash of the other engram fields gives {rows}"


def to_published(
  config: config_lib.ModelConfig,
  *,
  bos_token_id: int = 0,
  eos_token_id: int = 1,
  pad_token_id: int = 2,
) -> dict[str, Any]:
  """The contents of a config.json for this model; `from_published` reads it back.

  What comes back equals `config` but for the fields of mechanisms that are off, counts of 0 that
  mean "as another field" (written out), and what `lost_in_publishing` lists.

  Args:
    config: the model.
    bos_token_id, eos_token_id, pad_token_id: the tokenizer's, by default those of the release and
      of tokenizers trained here.

  Raises:
    ConfigError: all that the released form cannot say, by field.
  """
  from hysparse.parameters import engram_rows  # here, because reading must not wait for jax

  problems = [
    f"model.{name}: is {getattr(config, name)!r}; a released config.json means {only!r}"
    for name, only in names.IMPLIED.items()
    if getattr(config, name) != only
  ]
  if config.prompt_experts != config.experts_per_token:
    problems.append(
      f"model.experts_per_prompt_token: is {config.experts_per_prompt_token}; a released"
      f" config.json means as many as experts_per_token ({config.experts_per_token})"
    )
  schedule, rows = {}, ()
  try:
    schedule = published_schedule.to_published(config.layers, config.draft_layers)
    rows = engram_rows(config)
  except schedule_lib.ScheduleError as error:
    problems.append(f"model.schedule: {error}")
  except config_lib.ConfigError as error:
    problems.append(str(error))
  if problems:
    raise config_lib.ConfigError("; ".join(problems))

  text = {"model_type": "deepseek_v41_text", **names.FIXED, **schedule}
  for group in (names.CORE, names.SPARSE, names.CANDIDATES, names.ENGRAM, names.DRAFT):
    text |= _written(config, group)
  text |= {
    "engram_layer_ids": list(config.engram_layers),
    "engram_num_embeddings": list(rows),
    "engram_pad_token_id": config.engram_pad_id,
    "engram_compressed_vocab_size": config.engram_compressed_vocab or config.vocab_size,
    "num_nextn_predict_layers": config.draft_layers,
    "dspark_n_routed_experts": config.draft_experts or config.n_experts,
    "dspark_num_experts_per_tok": config.draft_experts_per_token or config.experts_per_token,
    "rope_scaling": None,
  }
  if config.yarn_factor:
    text["rope_scaling"] = {"rope_type": "yarn", **_written(config, names.YARN)}
  if config.gate_temp != 1:  # the release has no such field
    text["gate_temp"] = config.gate_temp
  values = {
    "architectures": [names.ARCHITECTURE],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": bos_token_id,
    "eos_token_id": eos_token_id,
    "pad_token_id": pad_token_id,
    "image_token_id": config.image_token_id,
    "quantization_config": copy.deepcopy(names.ENCODING),
    "text_config": text,
  }
  if config.vision_layers:
    vision = {"model_type": "deepseek_v41_vision", **_written(config, names.VISION)}
    values["vision_config"] = vision | {"max_wh_ratio": config.vision_max_wh_ratio or None}
  return values


def lost_in_publishing(config: config_lib.ModelConfig) -> list[str]:
  """What a reader of this model's config.json will not know, in lines to print; often none.

  The weights and what they compute stay the same: a bar decides only what prefill may leave out.
  """
  layers = config.layers
  found = published_schedule.bar_on_import(layers.kv_sources, [spec.ratio for spec in layers])
  if found == layers.decoder_start:
    return []
  ours, theirs = (
    "none" if bar is None else f"one before layer {bar}" for bar in (layers.decoder_start, found)
  )
  return [f"model.schedule: the bar has no published field: this model has {ours}, a reader of its"
          f" config.json will see {theirs}"]  # fmt: skip


class _Reader:
  """Takes typed fields out of a mapping and collects what is wrong with them."""

  def __init__(
    self, values: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None
  ):
    self.values = values
    self.prefix = prefix
    self.problems = [] if problems is None else problems

  def take(self, fields: Mapping[str, str]) -> dict[str, Any]:
    """Required fields, under our names."""
    return {ours: self.field(name, _TYPES[ours]) for name, ours in fields.items()}

  def field(self, name: str, hint: Any, default: Any = ...) -> Any:
    """One field; without a default it is required. None if there is a problem with it."""
    value = self.values.get(name)
    if value is None and default is not ...:
      return default
    if name not in self.values:
      self.problems.append(f"{self.prefix}{name}: is missing")
      return None
    try:
      return config_fields.convert(hint, value, self.prefix + name)
    except config_lib.ConfigError as error:
      self.problems.append(str(error))
      return None

  def check(self, legal: Mapping[str, Any]) -> None:
    """Fields with one legal value; a missing one means it."""
    for name, only in legal.items():
      value = self.values.get(name, only)
      if value != only:
        self.problems.append(f"{self.prefix}{name}: is {value!r}; must be {only!r}")

  def inside(self, name: str) -> _Reader:
    """A reader of a nested group that adds to the same problems."""
    group = self.values[name]
    if not isinstance(group, Mapping):
      self.problems.append(f"{self.prefix}{name}: is {group!r}; must be a group of fields or null")
      group = {}
    return _Reader(group, f"{self.prefix}{name}.", self.problems)


def _fields(reader: _Reader, decoder_start: int | Literal["auto"] | None) -> dict[str, Any]:
  """Arguments of `ModelConfig`; what could not be read is among the reader's problems."""
  reader.check(names.FIXED)
  fields = reader.take(names.CORE)
  fields["gate_temp"] = reader.field("gate_temp", float, default=1.0)
  fields |= _rope_scaling(reader)
  schedule = _schedule_fields(reader)
  if any(schedule["compress_ratios"] or ()):
    fields |= reader.take(names.SPARSE)
  else:
    fields["top_k"] = 0
  if schedule["candidate_source_layer_id"] != -1:
    fields |= reader.take(names.CANDIDATES)
  if schedule["engram_layer_ids"]:
    fields |= reader.take(names.ENGRAM)
    fields["engram_compressed_vocab"] = fields["engram_compressed_vocab"] or fields["vocab_size"]
    pads = [name for name in ("engram_pad_token_id", "engram_pad_id") if name in reader.values]
    fields["engram_pad_id"] = reader.field(pads[0] if pads else "engram_pad_token_id", int)
    rows = reader.field("engram_num_embeddings", tuple[int, ...])
    if rows is not None and len(rows) != len(schedule["engram_layer_ids"]):
      layers = len(schedule["engram_layer_ids"])
      reader.problems.append(f"engram_num_embeddings: has {len(rows)} entries; {layers} layers")
  if schedule["num_nextn_predict_layers"]:
    fields["draft_layers"] = schedule["num_nextn_predict_layers"]
    fields |= reader.take(names.DRAFT)
    fields["draft_experts"] = fields["draft_experts"] or fields["n_experts"]
    active = fields["draft_experts_per_token"] or fields["experts_per_token"]
    fields["draft_experts_per_token"] = active
  if not reader.problems:
    try:
      layers = published_schedule.from_published(schedule, decoder_start=decoder_start)
      # The order of the Engram layers decides which primes each of them gets.
      fields |= {"schedule": str(layers), "engram_layers": schedule["engram_layer_ids"]}
    except schedule_lib.ScheduleError as error:
      reader.problems.append(str(error))
  return fields


def _schedule_fields(reader: _Reader) -> dict[str, Any]:
  ids = tuple[int, ...]
  return {
    "num_hidden_layers": reader.field("num_hidden_layers", int),
    "compress_ratios": reader.field("compress_ratios", ids),
    "kv_source_layer_ids": reader.field("kv_source_layer_ids", ids),
    "index_source_layer_ids": reader.field("index_source_layer_ids", ids),
    "candidate_source_layer_id": reader.field("candidate_source_layer_id", int, default=-1),
    "engram_layer_ids": reader.field("engram_layer_ids", ids, default=()),
    "num_nextn_predict_layers": reader.field("num_nextn_predict_layers", int, default=0),
  }


def _rope_scaling(reader: _Reader) -> dict[str, Any]:
  if reader.values.get("rope_scaling") is None:
    return {}
  scaling = reader.inside("rope_scaling")
  kind = scaling.field("rope_type", str)
  if kind not in (None, "yarn"):
    reader.problems.append(f"rope_scaling.rope_type: is {kind!r}; must be 'yarn'")
  return scaling.take(names.YARN)


def _vision(reader: _Reader) -> dict[str, Any]:
  """The fields of the tower; without it the image token is kept but means nothing."""
  if reader.values.get("vision_config") is None:
    return {"image_token_id": reader.field("image_token_id", int, default=0)}
  vision = reader.inside("vision_config")
  fields = {"image_token_id": reader.field("image_token_id", int), **vision.take(names.VISION)}
  fields["vision_max_wh_ratio"] = vision.field("max_wh_ratio", float, default=0.0)
  if fields["vision_layers"] == 0:
    reader.problems.append("vision_config.num_hidden_layers: is 0; must be at least 1")
  return fields


def _written(config: config_lib.ModelConfig, fields: Mapping[str, str]) -> dict[str, Any]:
  """Fields under their published names, JSON-ready."""
  values = {name: getattr(config, ours) for name, ours in fields.items()}
  return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _in_published_words(message: str) -> str:
  """A message about one of our fields, under the name that the file has for it."""
  ours = message.partition(":")[0].removeprefix("model.")
  published = next((theirs for theirs, own in names.FIELDS.items() if own == ours), None)
  return message if published is None else published + message.removeprefix(f"model.{ours}")
