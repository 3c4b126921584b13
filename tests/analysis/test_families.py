"""Models of other families: what their config.json says, what it leaves out, what is refused."""

import json

import pytest

from hysparse.analysis import footprint, waterfall
from hysparse.config import ConfigError

LLAMA = {
  "model_type": "llama",
  "num_hidden_layers": 4,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "hidden_size": 512,
}
MLA = {
  "model_type": "deepseek_v3",
  "num_hidden_layers": 3,
  "num_attention_heads": 16,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
}
V4 = {
  "model_type": "deepseek_v4",
  "num_hidden_layers": 3,
  "num_attention_heads": 8,
  "head_dim": 512,
  "qk_rope_head_dim": 64,
  "index_head_dim": 128,
  "sliding_window": 128,
  "compress_ratios": [0, 4, 128],
}
DIM = 64  # of a LLAMA head: 512 / 8


@pytest.fixture
def counted(tmp_path):
  def count(values, **arguments):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return footprint(path, context=1024, **arguments)

  return count


@pytest.mark.parametrize(
  "changes, per_token",
  [
    ({}, 4 * 2 * 2 * DIM * 2),
    ({"num_key_value_heads": None}, 4 * 2 * 8 * DIM * 2),  # MHA
    ({"num_key_value_heads": 1}, 4 * 2 * 1 * DIM * 2),  # MQA
    ({"head_dim": 128}, 4 * 2 * 2 * 128 * 2),
    ({"torch_dtype": "float32"}, 4 * 2 * 2 * DIM * 4),
    ({"dtype": "float16"}, 4 * 2 * 2 * DIM * 2),
    ({"sliding_window": 100}, 4 * 2 * 2 * DIM * 2),  # llama has no windows, whatever it says
    ({"model_type": "gpt_neox"}, 4 * 2 * 8 * DIM * 2),
    ({"model_type": "falcon"}, 4 * 2 * 1 * DIM * 2),
    ({"model_type": "falcon", "multi_query": False}, 4 * 2 * 8 * DIM * 2),
    ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4}, 4096),
    ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, 2048),
    ({"model_type": "qwen3"}, 4 * 2 * 2 * 128 * 2),  # its head_dim is not width / heads
    ({"model_type": "phi3", "sliding_window": 1024, "max_position_embeddings": 1024}, 2048),
  ],
)
def test_keys_and_values(counted, changes, per_token):
  table = counted({**LLAMA, **changes})
  assert table.per_token == per_token
  assert table.bytes(lifetime="bounded") == 0


def test_older_names_of_fields(counted):
  values = {"model_type": "bloom", "n_layer": 4, "num_attention_heads": 8, "n_embed": 512}
  table = counted({**values, "seq_length": 2048})
  assert table.per_token == 4 * 2 * 8 * DIM * 2 and table.model.max_positions == 2048
  assert counted({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}).per_token == 32


def test_a_family_says_what_its_files_leave_out(counted):
  assert counted({"model_type": "gemma3_text"}).model.max_positions == 131_072
  gemma = {"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 30}
  table = counted({**gemma, "num_attention_heads": 8})
  assert {line.layer for line in table.lines} == set(range(15))  # the others share


@pytest.mark.parametrize(
  "changes, full, rows",
  [
    ({"model_type": "mistral", "sliding_window": 100}, 0, 100),
    ({"model_type": "mistral", "sliding_window": None}, 4, 0),
    ({"model_type": "mixtral", "sliding_window": None}, 4, 0),
    ({"model_type": "gemma2"}, 2, 4096),
    ({"model_type": "gpt_oss"}, 2, 128),
    ({"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2}, 2, 7),
    ({"model_type": "cohere2", "sliding_window": 5}, 1, 5),
    (
      {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
       "max_window_layers": 1}, 1, 9,
    ),
    ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 6}, 1, 6),
  ],
)  # fmt: skip
def test_windows(counted, changes, full, rows):
  each = 2 * 2 * DIM * 2
  table = counted({**LLAMA, "head_dim": DIM, **changes})
  assert table.per_token == full * each
  assert table.bytes(lifetime="bounded") == (4 - full) * rows * each


def test_layers_that_share_keys_own_none(counted):
  kinds = ["sliding_attention", "full_attention"] * 2
  values = {**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 2, "layer_types": kinds}
  table = counted({**values, "head_dim": DIM, "sliding_window": 10})
  assert table.per_token == 2 * 2 * DIM * 2
  assert table.bytes(lifetime="bounded") == 10 * 2 * 2 * DIM * 2
  assert {line.layer for line in table.lines} == {0, 1}


def test_a_text_model_inside_another(counted):
  assert counted({"model_type": "llava", "text_config": LLAMA}).per_token == 2048
  assert counted({"text_config": LLAMA, "torch_dtype": "float32"}).per_token == 4096


def test_latents(counted):
  assert counted(MLA).per_token == 3 * 576 * 2
  assert counted(MLA, precision="fp8").per_token == 3 * 576
  indexed = {**MLA, "model_type": "deepseek_v32", "index_head_dim": 128}
  assert counted(indexed).per_token == 3 * (656 + 132)
  assert counted(indexed, precision="bf16").per_token == 3 * (576 + 128) * 2
  assert counted(V4).per_token == (584 + 68) / 4 + 584 / 128
  assert counted(V4).bytes(lifetime="bounded") == 3 * 128 * 584
  assert counted(V4, precision="bf16").per_token == (512 + 128) * 2 / 4 + 512 * 2 / 128


@pytest.mark.parametrize(
  "values, message",
  [
    ({}, "model_type: is None"),
    ({**LLAMA, "model_type": "mamba"}, "model_type: is 'mamba'"),
    ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers: is missing"),
    ({**LLAMA, "num_hidden_layers": "4"}, "num_hidden_layers: is '4'"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: is 0"),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads: is 3; must divide"),
    ({**LLAMA, "hidden_size": 511}, "hidden_size: is 511"),
    ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types: must list 4 layers"),
    ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "layer 0 is 'linear_attention'"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window: is missing"),
    ({**LLAMA, "num_kv_shared_layers": 4}, "num_kv_shared_layers: is 4"),
    ({**V4, "compress_ratios": [0, 4, 8]}, "layer 2 has 8"),
    ({**V4, "compress_ratios": [0]}, "must list a ratio for each of 3 layers"),
    ({**V4, "head_dim": 256}, "precision: v4 packs"),
    ([], "no object at its top"),
    ({**LLAMA, "model_type": ["llama"]}, "model_type: is"),
    ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "torch_dtype: is 'float8_e4m3fn'"),
    ({**LLAMA, "torch_dtype": ["a"]}, "torch_dtype: is"),
    ({**LLAMA, "max_position_embeddings": "4096"}, "max_position_embeddings: is '4096'"),
    ({**LLAMA, "max_position_embeddings": -5}, "max_position_embeddings: is -5"),
    ({**LLAMA, "model_type": "qwen2", "use_sliding_window": "false"}, "must be true or false"),
    ({**LLAMA, "model_type": "mistral", "sliding_window": False}, "sliding_window: is False"),
    ({**LLAMA, "model_type": "glm4_moe"}, "head_dim: is missing"),
    (
      {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"model_type": "qwen2"},
      "num_key_value_heads: is missing",
    ),
  ],
)
def test_what_is_refused(counted, values, message):
  with pytest.raises(ConfigError, match=message) as error:
    counted(values)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["v4", "fp4", {"main_kv": "fp8"}])
def test_formats_of_other_families(counted, precision):
  with pytest.raises(ConfigError, match="precision"):
    counted(LLAMA, precision=precision)


def test_files_that_cannot_be_read(tmp_path):
  (tmp_path / "broken.json").write_text("{")
  (tmp_path / "deep.json").write_text("[" * 200_000)
  for name in ("broken.json", "deep.json", "missing.json", "."):
    with pytest.raises(ConfigError) as error:
      footprint(tmp_path / name)
    assert "\n" not in str(error.value)


def test_the_waterfall_multiplies(counted, tmp_path):
  counted({**LLAMA, "num_key_value_heads": 2})
  fall = waterfall(tmp_path / "config.json")
  assert [step.per_token for step in fall.steps] == [8192, 2048, 2048, 2048, 2048]
  assert list(fall.factors.values()) == [4, 1, 1, 1]
  counted({**MLA, "model_type": "deepseek_v32", "index_head_dim": 128})
  fall = waterfall(tmp_path / "config.json")
  assert fall.steps[0].per_token == 3 * 16 * (192 + 128) * 2
  assert fall.steps[1].per_token == 3 * 704 * 2
  assert fall.steps[-1].per_token == 3 * 788
  assert len(fall.frame) == 5 and fall.plot()._repr_png_()
