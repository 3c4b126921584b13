"""A released config.json: reading it, everything that is wrong with one, writing it."""

import copy
import dataclasses
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import schedules

from hysparse import config_file, published, published_schedule
from hysparse import published_fields as names
from hysparse.config import ConfigError, ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
FILES = (GOLDEN / "hf_configs" / "deepseek-v4.1-flash.json", GOLDEN / "tiny-text" / "config.json",
         GOLDEN / "tiny-vision" / "config.json")  # fmt: skip


@pytest.fixture
def released():
  return json.loads((GOLDEN / "hf_configs" / "deepseek-v4.1-flash.json").read_text())


def published_error(config):
  with pytest.raises(ConfigError) as error:
    published.from_published(config)
  assert "\n" not in str(error.value)
  return str(error.value)


def test_the_release_is_the_config_of_its_name(released):
  ours = config_file.load(str(ROOT / "configs" / "v41_flash.py")).model
  assert published.from_published(released) == ours


def test_a_small_checkpoint_of_the_same_layout():
  model = published.read(str(FILES[1]))
  assert model.schedule == "swa full/2 reuse | full/1+candidates reuse reindex"
  assert (model.engram_layers, model.yarn_factor, model.draft_layers) == ((0, 1), 4.0, 1)


def test_the_list_of_ratios_may_lack_the_draft_layers(released):
  shorter = copy.deepcopy(released)
  del shorter["text_config"]["compress_ratios"][40:]
  assert published.from_published(shorter) == published.from_published(released)


def test_both_spellings_of_the_pad_id(released):
  other = copy.deepcopy(released)
  other["text_config"]["engram_pad_id"] = other["text_config"].pop("engram_pad_token_id")
  assert published.from_published(other) == published.from_published(released)


def test_mechanisms_that_are_off_leave_their_fields_unread(released):
  text = released["text_config"]
  text |= {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0}
  text |= {"engram_layer_ids": [], "engram_n_heads": 0, "engram_vocab_size": 0}
  text |= {"num_nextn_predict_layers": 0, "dspark_markov_rank": 0, "dspark_target_layer_ids": []}
  text |= {"dspark_block_size": 0, "dspark_noise_token_id": 10**9}
  released |= {"vision_config": None, "image_token_id": 10**9}
  text |= {"swiglu_limit": 0, "rope_scaling": None}
  text["compress_ratios"] = text["compress_ratios"][:40]
  model = published.from_published(released)
  assert model.layers.candidate_source is None
  assert (model.engram_layers, model.draft_layers, model.vision_layers) == ((), 0, 0)
  assert (model.swiglu_limit, model.yarn_factor) == (0.0, 0.0)
  assert model.compress_rope_theta == 160_000.0


def test_all_problems_are_reported_at_once(released):
  text = released["text_config"]
  del text["hidden_size"]
  text |= {"head_dim": "512", "hidden_act": "gelu", "rope_scaling": {"rope_type": "linear"}}
  released["vision_config"]["hidden_size"] = "1024"
  released["quantization_config"] |= {"quant_method": "awq", "weight_block_size": [128, 128]}
  message = published_error(released)
  for part in (
    "hidden_size: is missing",
    "head_dim: is '512'; must be a whole number",
    "hidden_act: is 'gelu'; must be 'silu'",
    "rope_scaling.rope_type: is 'linear'; must be 'yarn'",
    "rope_scaling.factor: is missing",
    "vision_config.hidden_size: is '1024'; must be a whole number",
    "quantization_config.quant_method: is 'awq'; must be 'fp8'",
    "quantization_config.weight_block_size: is [128, 128]; must be [32, 32]",
  ):
    assert part in message


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"o_groups": 7}, "o_groups: is 7; must be a divisor of n_heads (64)"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: is 63; must be even"),
    ({"sliding_window": 0}, "sliding_window: is 0; must be at least 1"),
    ({"n_shared_experts": 2}, "n_shared_experts: is 2; must be 1"),
    ({"scoring_func": "tanh"}, "scoring_func: is 'tanh'; must be one of 'sqrtsoftplus'"),
    ({"num_key_value_heads": 8}, "num_key_value_heads: is 8; must be 1"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings: is True; must be False"),
    ({"engram_num_embeddings": [1]}, "engram_num_embeddings: has 1 entries; 2 layers"),
    ({"rope_scaling": "yarn"}, "rope_scaling: is 'yarn'; must be a group of fields or null"),
    ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20: ratio 1 differs from 2"),
    ({"compress_ratios": [0] * 41}, "compress_ratios: has 41 entries; 40 layers"),
    ({"compress_ratios": None}, "compress_ratios: is None; must be a sequence of whole numbers"),
    ({"num_hidden_layers": "40"}, "num_hidden_layers: is '40'; must be a whole number"),
    ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids: is (40,); must be layers in"),
    ({"dspark_block_size": 0}, "dspark_block_size: is 0; must be at least 1"),
    ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id: is 129280; must be in 0..vocab"),
  ],
)
def test_problems_are_told_in_the_words_of_the_file(released, changes, message):
  released["text_config"] |= changes
  assert message in published_error(released)


@pytest.mark.parametrize(
  "group, changes, message",
  [
    ("vision_config", {"num_attention_heads": 3},
     "vision_config.num_attention_heads: is 3; must be such that vision_dim (1024)"),
    ("vision_config", {"num_hidden_layers": 0}, "vision_config.num_hidden_layers: is 0; must be"),
    ("vision_config", {"max_wh_ratio": 0.5}, "vision_config.max_wh_ratio: is 0.5; must be 0 (any)"),
    ("quantization_config", {"scale_fmt": "f32"}, "quantization_config.scale_fmt: is 'f32'; must"),
    ("quantization_config", {"expert_dtype": "fp8"}, "expert_dtype: is 'fp8'; must be 'fp4'"),
    (None, {"image_token_id": 129280}, "image_token_id: is 129280; must be in 0..vocab_size-1"),
    (None, {"image_token_id": None}, "image_token_id: is None; must be a whole number"),
    (None, {"vision_config": [1]}, "vision_config: is [1]; must be a group of fields or null"),
    (None, {"quantization_config": "fp8"}, "quantization_config: is 'fp8'; must be a group of"),
  ],
)  # fmt: skip
def test_problems_outside_the_text_config(released, group, changes, message):
  (released if group is None else released[group]).update(changes)
  assert message in published_error(released)


@pytest.mark.parametrize(
  "config, message",
  [
    ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM; only DeepseekV41"),
    ({}, "architecture None; only DeepseekV41"),
    ({"architectures": ["DeepseekV41ForCausalLM"]}, "text_config: is missing"),
    ([], "no object at its top"),
  ],
)
def test_unknown_architectures_are_refused_by_name(config, message):
  assert message in published_error(config)


def test_unreadable_files(tmp_path):
  with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
    published.read(str(tmp_path / "none.json"))
  broken = tmp_path / "broken.json"
  broken.write_text("{")
  with pytest.raises(ConfigError, match=r"broken\.json: is not JSON"):
    published.read(str(broken))


def test_every_model_field_is_read_from_the_release_or_is_ours():
  ours = {"experts_per_prompt_token", *names.IMPLIED}
  by_rule = {"schedule", "engram_layers", "engram_pad_id", "draft_layers", "gate_temp"}
  by_rule |= {"image_token_id"}
  assert set(ModelConfig.__dataclass_fields__) == {*names.FIELDS.values(), *by_rule, *ours}


# --- Writing one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_files_of_the_release_are_written_as_they_were(path):
  read = json.loads(path.read_text())
  model = published.from_published(read)
  written = published.to_published(model)
  assert json.loads(json.dumps(written)) == read
  assert published.engram_rows_problem(read, model) is None
  assert published.lost_in_publishing(model) == []


SIZES = st.integers(1, 9)


@st.composite
def released_values(draw):
  """A random config.json of the released form, switches on and off."""
  schedule = draw(schedules(published_only=True))
  drafts = draw(st.integers(0, 2))
  heads, vocab = draw(st.integers(1, 4)), draw(st.integers(8, 100))
  tokens = st.integers(0, vocab - 1)
  text = {name: draw(SIZES) for name in names.CORE}
  text |= {
    **published_schedule.to_published(schedule, drafts),
    "vocab_size": vocab,
    "num_attention_heads": 2 * heads,
    "o_groups": draw(st.sampled_from([1, 2, heads])),
    "qk_rope_head_dim": 2,
    "head_dim": draw(st.integers(2, 9)),
    "n_routed_experts": draw(st.integers(3, 6)),
    "num_experts_per_tok": draw(st.integers(1, 3)),
    "scoring_func": draw(st.sampled_from(["sqrtsoftplus", "sigmoid", "softmax"])),
    "norm_topk_prob": draw(st.booleans()),
    "swiglu_limit": draw(st.sampled_from([0, 10.0])),
    "rms_norm_eps": 1e-20,
    "rope_theta": draw(st.sampled_from([100, 10_000.0])),
    "gate_temp": draw(st.sampled_from([1, 0.5])),
    "num_nextn_predict_layers": drafts,
    "rope_scaling": draw(st.none() | st.fixed_dictionaries(dict.fromkeys(names.YARN, SIZES))),
    "compress_rope_theta": 160_000,
    "index_n_heads": draw(SIZES), "index_head_dim": draw(st.integers(2, 9)),
    "index_topk": draw(SIZES),
    "candidate_topk_blocks": draw(SIZES), "candidate_block_size": draw(SIZES),
    "engram_layer_ids": draw(st.permutations(list(schedule.engram_layers))),
    "engram_max_ngram_size": draw(st.integers(2, 4)),
    "engram_n_heads": draw(SIZES), "engram_head_dim": draw(SIZES), "engram_vocab_size": draw(SIZES),
    "engram_compressed_vocab_size": draw(st.integers(0, vocab)),
    draw(st.sampled_from(["engram_pad_id", "engram_pad_token_id"])): draw(tokens),
    "engram_num_embeddings": [1] * len(schedule.engram_layers),
    "dspark_block_size": draw(SIZES), "dspark_noise_token_id": draw(tokens),
    "dspark_target_layer_ids": [draw(st.integers(0, len(schedule) - 1))],
    "dspark_markov_rank": draw(SIZES),
    "dspark_n_routed_experts": draw(st.sampled_from([0, 4])),
    "dspark_num_experts_per_tok": draw(st.integers(0, 3)),
  }  # fmt: skip
  if text["rope_scaling"]:
    text["rope_scaling"]["rope_type"] = "yarn"
  vision = {name: draw(SIZES) for name in names.VISION} | {"rope_theta": draw(st.integers(2, 9))}
  vision["hidden_size"] = 4 * vision["num_attention_heads"] * draw(SIZES)
  vision["max_wh_ratio"] = draw(st.sampled_from([None, 8, 1.5]))
  return {
    "architectures": [names.ARCHITECTURE],
    "image_token_id": draw(tokens),
    "text_config": text,
    "vision_config": draw(st.sampled_from([None, vision])),
  }


@settings(derandomize=True, deadline=None, max_examples=150)
@given(released_values())
def test_what_is_written_is_read_back(values):
  model = published.from_published(values)
  written = json.loads(json.dumps(published.to_published(model)))
  assert published.from_published(written) == model
  assert published.engram_rows_problem(written, model) is None
  assert published.lost_in_publishing(model) == []


def test_the_order_of_the_engram_layers_decides_their_tables(released):
  released["text_config"]["engram_layer_ids"] = [14, 1]
  model = published.from_published(released)
  assert model.engram_layers == (14, 1)
  assert published.engram_rows_problem(released, model) is None
  assert published.to_published(model)["text_config"]["engram_layer_ids"] == [14, 1]


def test_tables_of_another_size_are_told_with_both(released):
  released["text_config"]["engram_num_embeddings"] = [384_006_168, 384_016_681]
  problem = published.engram_rows_problem(released, published.from_published(released))
  assert "[384006168, 384016681]" in problem and "[384006168, 384016682]" in problem
  released["text_config"]["engram_vocab_size"] = 2**24
  problem = published.engram_rows_problem(released, published.from_published(released))
  assert problem.startswith("engram_vocab_size: is 16777216; must be in")
  released["text_config"]["engram_layer_ids"] = []
  assert published.engram_rows_problem(released, published.from_published(released)) is None


def test_what_has_no_published_form_is_refused_by_name_at_once():
  model = dataclasses.replace(
    config_file.load(str(ROOT / "configs" / "tiny.py")).model,
    schedule="mha swa dense/2 reuse", residual="two_pass", shared_experts=0, main_kv="bf16",
    experts_per_prompt_token=1,
  )  # fmt: skip
  with pytest.raises(ConfigError) as error:
    published.to_published(model)
  assert "\n" not in str(error.value)
  for part in (
    "layer 0: 'mha' has no published field",
    "layer 2: 'dense/2' has no published field",
    "model.residual: is 'two_pass'; a released config.json means 'single_pass'",
    "model.shared_experts: is 0;",
    "model.main_kv: is 'bf16'; a released config.json means 'fp4'",
    "model.experts_per_prompt_token: is 1;",
  ):
    assert part in str(error.value)


@pytest.mark.parametrize(
  "schedule, ours, theirs",
  [("swa | full/2 reuse", "one before layer 1", "none"),
   ("swa full/1 reuse", "none", "one before layer 1"),
   ("swa full/2 | full/1 reuse", None, None)],
)  # fmt: skip
def test_a_bar_that_a_reader_will_not_put_there_is_told(schedule, ours, theirs):
  tiny = config_file.load(str(ROOT / "configs" / "tiny.py")).model
  model = dataclasses.replace(tiny, schedule=schedule, engram_layers=())
  read = published.from_published(published.to_published(model))
  lost = published.lost_in_publishing(model)
  assert (read.schedule == model.schedule) == (lost == []) == (ours is None)
  if lost:
    assert f"this model has {ours}" in lost[0] and f"will see {theirs}" in lost[0]


def test_special_tokens_are_the_tokenizers(released):
  model = published.from_published(released)
  written = published.to_published(model, bos_token_id=7, eos_token_id=8, pad_token_id=9)
  assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [7, 8, 9]
