"""Reads a released config.json into a `ModelConfig`.

Only what this project can build is accepted; everything wrong with a file is reported at once, in
one line. `candidate_source_layer_id` -1, `swiglu_limit` 0, `engram_layer_ids` [], `rope_scaling`
null and `num_nextn_predict_layers` 0 each switch a mechanism off, and the fields of that mechanism
are then not read (writers leave anything in them).

Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import json
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, Literal

from hysparse import config as config_lib
from hysparse import published_schedule
from hysparse import schedule as schedule_lib

ARCHITECTURE = "DeepseekV41ForCausalLM"

# Read always: published name -> ours.
_CORE = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_attention_heads": "n_heads",
  "head_dim": "head_dim",
  "qk_rope_head_dim": "rope_dim",
  "q_lora_rank": "q_rank",
  "o_groups": "o_groups",
  "o_lora_rank": "o_rank",
  "sliding_window": "window",
  "n_routed_experts": "n_experts",
  "num_experts_per_tok": "experts_per_token",
  "n_shared_experts": "shared_experts",
  "moe_intermediate_size": "expert_dim",
  "swiglu_limit": "swiglu_limit",
  "scoring_func": "score_func",
  "norm_topk_prob": "norm_topk_prob",
  "routed_scaling_factor": "route_scale",
  "hc_mult": "streams",
  "hc_sinkhorn_iters": "sinkhorn_iters",
  "hc_eps": "hc_eps",
  "rms_norm_eps": "norm_eps",
  "rope_theta": "rope_theta",
  "max_position_embeddings": "max_positions",
}
# Read when some layer has a global branch.
_SPARSE = {
  "compress_rope_theta": "compress_rope_theta",
  "index_n_heads": "index_heads",
  "index_head_dim": "index_dim",
  "index_topk": "top_k",
}
_CANDIDATES = {
  "candidate_topk_blocks": "candidate_blocks",
  "candidate_block_size": "candidate_block_size",
}
_ENGRAM = {
  "engram_max_ngram_size": "engram_max_ngram",
  "engram_n_heads": "engram_heads",
  "engram_head_dim": "engram_dim",
  "engram_vocab_size": "engram_vocab",
  "engram_compressed_vocab_size": "engram_compressed_vocab",
}
_DRAFT = {
  "dspark_n_routed_experts": "draft_experts",
  "dspark_num_experts_per_tok": "draft_experts_per_token",
  "dspark_target_layer_ids": "draft_target_layers",
  "dspark_markov_rank": "draft_markov_rank",
}
_YARN = {
  "factor": "yarn_factor",
  "original_max_position_embeddings": "yarn_original",
  "beta_fast": "yarn_beta_fast",
  "beta_slow": "yarn_beta_slow",
}
FIELDS = {**_CORE, **_SPARSE, **_CANDIDATES, **_ENGRAM, **_DRAFT, **_YARN}  # published -> ours

# One legal value each: there is nothing to configure, but another value is another model.
_FIXED = {
  "num_key_value_heads": 1,
  "hidden_act": "silu",
  "attention_bias": False,
  "tie_word_embeddings": False,
  "topk_method": "noaux_tc",
}

_TYPES = typing.get_type_hints(config_lib.ModelConfig)


def read(path: str) -> config_lib.ModelConfig:
  """The model of a released config.json.

  Raises:
    ConfigError: an unreadable file, an unknown architecture, or all problems of its fields.
  """
  try:
    values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
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
  if architectures != [ARCHITECTURE]:
    named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
    raise config_lib.ConfigError(f"{name}: architecture {named}; only {ARCHITECTURE} can be read")
  text = values.get("text_config")
  if not isinstance(text, Mapping):
    raise config_lib.ConfigError(f"{name}: text_config: is missing")
  reader = _Reader(text)
  fields = _fields(reader, decoder_start)
  if not reader.problems:
    try:
      return config_lib.ModelConfig(**fields)
    except config_lib.ConfigError as error:
      reader.problems.append(_in_published_words(str(error)))
  raise config_lib.ConfigError(f"{name}: " + "; ".join(reader.problems))


class _Reader:
  """Takes typed fields out of a mapping and collects what is wrong with them."""

  def __init__(
    self, values: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None
  ):
    self.values = values
    self.prefix = prefix
    self.problems = [] if problems is None else problems

  def take(self, names: Mapping[str, str]) -> dict[str, Any]:
    """Required fields, under our names."""
    return {ours: self.field(name, _TYPES[ours]) for name, ours in names.items()}

  def field(self, name: str, hint: Any, default: Any = ...) -> Any:
    """One field; without a default it is required. None if there is a problem with it."""
    value = self.values.get(name)
    if value is None and default is not ...:
      return default
    if name not in self.values:
      self.problems.append(f"{self.prefix}{name}: is missing")
      return None
    try:
      return config_lib.convert(hint, value, self.prefix + name)
    except config_lib.ConfigError as error:
      self.problems.append(str(error))
      return None

  def inside(self, name: str) -> _Reader:
    """A reader of a nested group that adds to the same problems."""
    group = self.values[name]
    if not isinstance(group, Mapping):
      self.problems.append(f"{self.prefix}{name}: is {group!r}; must be a group of fields or null")
      group = {}
    return _Reader(group, f"{self.prefix}{name}.", self.problems)


def _fields(reader: _Reader, decoder_start: int | Literal["auto"] | None) -> dict[str, Any]:
  """Arguments of `ModelConfig`; what could not be read is among the reader's problems."""
  for name, legal in _FIXED.items():
    value = reader.values.get(name, legal)
    if value != legal:
      reader.problems.append(f"{name}: is {value!r}; must be {legal!r}")
  fields = reader.take(_CORE)
  fields["gate_temp"] = reader.field("gate_temp", float, default=1.0)
  fields |= _rope_scaling(reader)
  schedule = _schedule_fields(reader)
  if any(schedule["compress_ratios"] or ()):
    fields |= reader.take(_SPARSE)
  else:
    fields["top_k"] = 0
  if schedule["candidate_source_layer_id"] != -1:
    fields |= reader.take(_CANDIDATES)
  if schedule["engram_layer_ids"]:
    fields |= reader.take(_ENGRAM)
    pads = [name for name in ("engram_pad_token_id", "engram_pad_id") if name in reader.values]
    fields["engram_pad_id"] = reader.field(pads[0] if pads else "engram_pad_token_id", int)
    rows = reader.field("engram_num_embeddings", tuple[int, ...])
    if rows is not None and len(rows) != len(schedule["engram_layer_ids"]):
      layers = len(schedule["engram_layer_ids"])
      reader.problems.append(f"engram_num_embeddings: has {len(rows)} entries; {layers} layers")
  if schedule["num_nextn_predict_layers"]:
    fields["draft_layers"] = schedule["num_nextn_predict_layers"]
    fields |= reader.take(_DRAFT)
  if not reader.problems:
    try:
      layers = published_schedule.from_published(schedule, decoder_start=decoder_start)
      fields |= {"schedule": str(layers), "engram_layers": layers.engram_layers}
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
  return scaling.take(_YARN)


def _in_published_words(message: str) -> str:
  """A message about one of our fields, under the name that the file has for it."""
  ours = message.partition(":")[0].removeprefix("model.")
  published = next((theirs for theirs, own in FIELDS.items() if own == ours), None)
  return message if published is None else published + message.removeprefix(f"model.{ours}")
