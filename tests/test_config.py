"""Configs: the files of configs/, overrides and error messages."""

import json
import math
import pathlib

import pytest

from hysparse import config_file
from hysparse.config import Config, ConfigError

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def values(name="tiny"):
  """A config file's contents before they are checked."""
  return config_file.load(str(ROOT / "configs" / f"{name}.py")).to_dict()


def from_dict_error(changed):
  with pytest.raises(ConfigError) as error:
    Config.from_dict(changed)
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_load_lock_and_survive_json(name):
  config = config_file.load(str(ROOT / "configs" / f"{name}.py"))
  assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_files_return_a_locked_dict_and_say_how_to_run(name):
  path = ROOT / "configs" / f"{name}.py"
  namespace = {}
  exec(compile(path.read_text(), str(path), "exec"), namespace)
  assert namespace["get_config"]().is_locked
  assert f"--config=configs/{name}.py" in namespace["__doc__"]


def test_tiny_drops_most_entries_of_every_source_at_its_training_length():
  config = Config.from_dict(values("tiny"))
  model = config.model
  assert model.engram_layers and model.layers.candidate_source is not None
  assert {spec.mode for spec in model.layers} == {"swa", "full", "reuse", "reindex"}
  for source in model.layers.kv_sources:
    entries = config.data.seq_len // model.layers[source].ratio
    assert model.top_k < entries / 4
  assert model.candidate_blocks * model.candidate_block_size < config.data.seq_len


def test_small_has_kernel_friendly_widths():
  config = Config.from_dict(values("small"))
  model = config.model
  widths = (model.d_model, model.head_dim, model.rope_dim, model.q_rank, model.o_rank,
            model.index_dim, model.expert_dim, model.engram_dim, model.vocab_size)  # fmt: skip
  assert all(width % 32 == 0 for width in widths)
  assert (config.data.seq_len, config.train.compute_dtype) == (4096, "bfloat16")


# --- Messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "path, value, message",
  [
    ("model.topk", 8, "model.topk: unknown field; did you mean model.top_k?"),
    ("optim.learning_rate", 1.0, "optim.learning_rate: unknown field; did you mean optim."),
    ("modle", {}, "modle: unknown field; did you mean model?"),
    ("model.top_k", "8", "model.top_k: is '8'; must be a whole number"),
    ("model.top_k", True, "model.top_k: is True; must be a whole number"),
    ("model.top_k", 8.0, "model.top_k: is 8.0; must be a whole number"),
    ("model.norm_topk_prob", 1, "model.norm_topk_prob: is 1; must be True or False"),
    ("optim.lr", "fast", "optim.lr: is 'fast'; must be a number"),
    ("optim.lr", math.nan, "optim.lr: is nan; must be finite"),
    ("data.source", 7, "data.source: is 7; must be a text"),
    ("model.engram_layers", 1, "model.engram_layers: is 1; must be a sequence of whole numbers"),
    ("model.engram_layers", ["1"], "model.engram_layers: is '1'; must be a whole number"),
    ("model.main_kv", "int4", "model.main_kv: is 'int4'; must be one of 'fp4', 'mxfp4', 'fp8'"),
    ("model.residual", "two", "model.residual: is 'two'; must be one of 'single_pass'"),
    ("model", 3, "model: must be a group of fields, got 3"),
    ("model.d_model", 0, "model.d_model: is 0; must be at least 1"),
    ("model.window", -1, "model.window: is -1; must be at least 1"),
    ("model.rope_dim", 7, "model.rope_dim: is 7; must be even and in 2..head_dim (32)"),
    ("model.rope_dim", 34, "model.rope_dim: is 34; must be even and in 2..head_dim (32)"),
    ("model.o_groups", 3, "model.o_groups: is 3; must be a divisor of n_heads (4)"),
    ("model.experts_per_token", 9, "model.experts_per_token: is 9; must be at most n_experts (8)"),
    ("model.experts_per_prompt_token", 3,
     "model.experts_per_prompt_token: is 3; must be in 0..experts_per_token (2)"),
    ("model.shared_experts", 2, "model.shared_experts: is 2; must be 0 or 1"),
    ("model.swiglu_limit", -1, "model.swiglu_limit: is -1.0; must be 0 (no clamp) or positive"),
    ("model.norm_eps", 0, "model.norm_eps: is 0.0; must be positive"),
    ("model.rope_theta", 0, "model.rope_theta: is 0.0; must be above 1"),
    ("model.residual", "plain", "model.streams: is 4; must be 1 when residual is 'plain'"),
    ("model.top_k", 0, "model.top_k: is 0; must be at least 1"),
    ("model.index_heads", 0, "model.index_heads: is 0; must be at least 1: some layer has"),
    ("model.index_dim", 8, "model.index_dim: is 8; must be at least rope_dim (16)"),
    ("model.candidate_blocks", 0, "model.candidate_blocks: is 0; must be at least 1: a layer has"),
    ("model.candidate_block_size", 0, "model.candidate_block_size: is 0; must be at least 1"),
    ("model.engram_heads", 0, "model.engram_heads: is 0; must be at least 1: engram_layers"),
    ("model.engram_max_ngram", 1, "model.engram_max_ngram: is 1; must be at least 2"),
    ("model.engram_pad_id", 1024, "model.engram_pad_id: is 1024; must be in 0..vocab_size-1"),
    ("model.yarn_factor", 0.5, "model.yarn_factor: is 0.5; must be 0 (no YaRN) or at least 1"),
    ("model.draft_layers", 1, "model.draft_markov_rank: is 0; must be at least 1"),
    ("model.vision_layers", -1, "model.vision_layers: is -1; must be 0 (no vision) or more"),
    ("model.vision_layers", 1, "model.vision_dim: is 0; must be at least 1: there are vision"),
    ("train.numerics", "fp8", "train.numerics: is 'fp8'; must be one of 'exact', 'kvquant'"),
    ("model.schedule", "swa*3 reuse",
     "model.schedule: layer 3: 'reuse' comes before any full or dense layer"),
    ("model.schedule", "", "model.schedule: is empty"),
    ("model.schedule", "gqa/3*8", "model.schedule: layer 0: gqa/3 does not divide n_heads (4)"),
    ("model.engram_layers", [8], "model.engram_layers: layer 8 is outside 0..7"),
    ("data.seq_len", 1004, "data.seq_len: is 1004; must be a multiple of 8"),
    ("data.seq_len", 16_384, "data.seq_len: is 16384; at most model.max_positions (8192)"),
    ("data.tokenizer", "bpe:9", "data.tokenizer: is 'bpe:9'; must be bpe:N with N at least 260"),
    ("data.holdout", 0, "data.holdout: is 0.0; must be between 0 and 1"),
    ("optim.constant_share", 2, "optim.constant_share: is 2.0; must be 0 <= constant_share"),
    ("optim.b1", 1, "optim.b1: is 1.0; must be in [0, 1)"),
    ("train.steps", 0, "train.steps: is 0; must be at least 1"),
    ("eval.temperature", -1, "eval.temperature: is -1.0; must be 0 or more"),
  ],
)  # fmt: skip
def test_messages_name_the_field_the_value_and_what_is_legal(path, value, message):
  changed = values()
  *groups, field = path.split(".")
  group = changed
  for name in groups:
    group = group[name]
  group[field] = value
  assert from_dict_error(changed).startswith(message)


def test_a_missing_field_is_named():
  changed = values()
  del changed["model"]["d_model"]
  assert from_dict_error(changed) == "model.d_model: is missing"


# --- Files and overrides -------------------------------------------------------------------------


def test_overrides_reach_every_field_also_those_the_file_leaves_out():
  overrides = ["model.main_kv=bf16", "optim.lr=1e-4", "model.engram_layers=(0,)", "train.seed=7",
               "train.scan_layers=false"]  # fmt: skip
  config = config_file.load(str(ROOT / "configs" / "tiny.py"), overrides)
  assert (config.model.main_kv, config.optim.lr) == ("bf16", 1e-4)
  assert (config.model.engram_layers, config.train.seed) == ((0,), 7)
  assert config.train.scan_layers is False


def test_overrides_are_separated_from_other_arguments():
  argv = ["train.py", "--config=a.py", "--config.model.top_k=3", "--workdir=w", "-config.a.b=c=d"]
  rest, overrides = config_file.split_overrides(argv)
  assert rest == ["train.py", "--config=a.py", "--workdir=w"]
  assert overrides == ["model.top_k=3", "a.b=c=d"]


@pytest.mark.parametrize(
  "text, message",
  [
    (None, "no such file"),
    ("x = 1", "has no get_config()"),
    ("def get_config(:", "invalid syntax"),
  ],
)
def test_files_that_are_no_config(tmp_path, text, message):
  path = tmp_path / "some.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ConfigError) as error:
    config_file.load(str(path))
  assert message in str(error.value) and str(path) in str(error.value)
  assert "\n" not in str(error.value)


def test_an_override_below_a_field_is_refused():
  with pytest.raises(ConfigError, match="'d_model' is a field, not a group"):
    config_file.load(str(ROOT / "configs" / "tiny.py"), ["model.d_model.x=1"])


def test_tiny_has_every_mechanism_and_really_selects():
  tiny = config_file.load(str(ROOT / "configs" / "tiny.py"))
  model, layers = tiny.model, tiny.model.layers
  assert {spec.mode for spec in layers} == {"swa", "full", "reindex", "reuse"}
  assert layers.candidate_source is not None and layers.decoder_start and layers.engram_layers
  assert model.residual == "single_pass" and model.streams > 1 and model.shared_experts
  for source in layers.kv_sources:
    assert model.top_k < tiny.data.seq_len / layers[source].ratio / 4
  pool = model.candidate_blocks * model.candidate_block_size
  assert model.top_k < pool / 4 and pool < tiny.data.seq_len
