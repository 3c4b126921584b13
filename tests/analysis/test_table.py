"""Bytes: golden figures of ten models, a closed form of our own, and the arrays of real caches."""

import dataclasses
import json
import math
import pathlib
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import schedules

import hysparse
from hysparse import config_file
from hysparse.analysis import footprint
from hysparse.cache.layout import Precision
from hysparse.config import Config, ConfigError, DataConfig, ModelConfig

ROOT = pathlib.Path(__file__).parents[2]
HF = ROOT / "tests" / "golden" / "hf_configs"
EXPECTED = {
  name: figures
  for name, figures in json.loads((HF / "expected.json").read_text()).items()
  if not name.startswith("_")
}
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.py"))
RELEASED = HF / "deepseek-v4.1-flash.json"
FORMATS = ("fp4", "mxfp4", "fp8", "bf16", "f32")


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_bytes(name):
  expected, table = EXPECTED[name], footprint(HF / f"{name}.json")
  assert table.per_token == expected["per_token"]
  if "bounded" in expected:
    assert table.bytes(lifetime="bounded") == expected["bounded"]
  else:
    windows = [table.bytes(component=f"window_{side}") for side in ("encoder", "decoder", "draft")]
    assert sum(windows[:2]) == expected["bounded_windows_backbone"]
    assert windows[2] == expected["bounded_windows_draft"]
  if expected.get("format") != "v41":  # ours has a dial
    assert table.model.precision == expected.get("format", "bf16")


@pytest.mark.parametrize(
  "precision, bytes_per_token", [("fp8", 1650), ({"main_kv": "fp8"}, 1490), (None, 890)]
)
def test_the_dial(precision, bytes_per_token):
  assert footprint(RELEASED, precision=precision).per_token == bytes_per_token


# --- A closed form: the table of formats and lifetimes, written without our layouts --------------


def entry(format, width):
  """Bytes of an entry: two E2M1 codes a byte, an E4M3 scale per 16 or an E8M0 one per 32."""
  if format in ("bf16", "f32"):
    return width * (2 if format == "bf16" else 4)
  codes = width if format == "fp8" else math.ceil(width / 2)
  return codes + math.ceil(width / (16 if format == "fp4" else 32))


def closed_form(model: ModelConfig, dial: Precision) -> tuple[Fraction, int]:
  """(bytes a token, bounded bytes) of one sequence."""
  grows, bounded = Fraction(0), 0
  C, D, W = model.head_dim, model.index_dim, model.window
  layers = list(model.layers)
  for i, spec in enumerate(layers):
    if spec.mode in ("mha", "gqa"):
      heads = spec.kv_heads if spec.mode == "gqa" else model.n_heads
      grows += 2 * heads * C * (4 if dial.plain_kv == "f32" else 2)
      continue
    bounded += W * entry(dial.window_kv, C)
    if spec.mode in ("full", "dense"):
      readers = [s for j, s in enumerate(layers) if j == i or s.kv_source == i]
      scored = any(s.mode in ("full", "reindex") for s in readers)
      each = entry(dial.main_kv, C) + (entry(dial.index_k, D) if scored else 0)
      grows += Fraction(each, spec.ratio)
      bounded += (spec.ratio - 1) * 2 * C * 4
  bounded += model.draft_layers * W * entry(dial.window_kv, C)
  bounded += 4 * (model.engram_max_ngram - 1) if model.engram_layers else 0
  return grows, bounded


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_equals_the_closed_form(path):
  model = config_file.load(str(ROOT / path)).model
  table = footprint(model)
  dial = Precision(model.main_kv, model.index_k, model.window_kv)
  assert (table.per_token, table.bytes(lifetime="bounded")) == closed_form(model, dial)


@st.composite
def models(draw):
  """A small random model with a random schedule and dial."""
  schedule = draw(schedules())
  base = config_file.load(str(ROOT / "configs" / "tiny.py")).model
  return dataclasses.replace(
    base,
    schedule=str(schedule),
    engram_layers=schedule.engram_layers,
    n_heads=base.o_groups * math.lcm(*(spec.kv_heads or 1 for spec in schedule.layers)),
    head_dim=draw(st.sampled_from((16, 40, 64))),
    rope_dim=8,
    index_dim=draw(st.sampled_from((16, 48))),
    window=draw(st.integers(1, 40)),
    main_kv=draw(st.sampled_from(FORMATS)),
    index_k=draw(st.sampled_from(FORMATS)),
    window_kv=draw(st.sampled_from(FORMATS)),
  )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(models(), st.integers(1, 3000), st.integers(1, 3))
def test_random_models_equal_the_closed_form(model, context, batch):
  dial = Precision(model.main_kv, model.index_k, model.window_kv)
  table = footprint(model, context=context, batch=batch)
  per_token, bounded = closed_form(model, dial)
  assert table.per_token == per_token
  assert table.bytes(lifetime="bounded") == batch * bounded
  grown = table.bytes(lifetime="global")
  pages = -(-context // table.page) * table.page
  assert grown == batch * per_token * pages  # a page is whole groups of tokens
  padding = sum(line.padding for line in table.lines)
  assert 0 <= padding <= batch * per_token * (table.page + model.alignment)


# --- Arrays --------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=25)
@given(models(), st.integers(1, 200), st.integers(1, 3))
def test_random_caches_hold_what_is_counted(model, context, batch):
  verified = footprint(model, context=context, batch=batch).verify()
  assert verified.equal, verified.frame


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_the_cache_of_every_config_holds_what_is_counted(path):
  verified = footprint(ROOT / path, context=1000, batch=2).verify()
  assert verified.equal, verified.frame


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp8", {"index_k": "bf16"}])
def test_every_dial_can_be_verified(precision):
  table = footprint(ROOT / "configs" / "tiny.py", context=100, precision=precision)
  verified = table.verify()
  assert verified.equal, verified.frame


@pytest.mark.slow
def test_generation_allocates_nothing_more():
  config = hysparse.load_config(str(ROOT / "configs" / "tiny.py"), ["train.numerics='kvquant'"])
  counted = footprint(config, context=128, batch=2).tier("resident")
  model = hysparse.create(config, seed=0)
  step = jax.jit(hysparse.forward, static_argnums=0, donate_argnums=3)
  tokens = jnp.ones((2, 16), jnp.int32)
  before = sum(array.nbytes for array in jax.live_arrays()) - tokens.nbytes
  cache = hysparse.allocate(config, 2, 128)
  for _ in range(4):
    live = sum(array.nbytes for array in jax.live_arrays())
    assert live - before - tokens.nbytes == counted
    output = step(*model, hysparse.Batch.of(tokens), cache)
    cache, tokens = output.cache, output.logits_BxNxV.argmax(-1)
    del output
  cache.check()


# --- The table itself ----------------------------------------------------------------------------


def test_lines_add_up_in_every_view():
  table = footprint(RELEASED, context=100_001, batch=3, replicas=2)
  frame, components = table.frame, table.components
  assert frame["total"].sum() == components["total"].sum() == table.bytes()
  assert components["share"].sum() == pytest.approx(1)
  parts = frame[["values", "scales", "padding", "replication"]].sum().sum()
  assert parts == table.bytes()
  once = footprint(RELEASED, context=100_001, batch=3)
  assert table.bytes() == 2 * once.bytes()
  padding = sum(line.padding for line in once.lines)
  assert table.tier("persistent") == once.tier("persistent")
  assert once.tier("persistent") == once.bytes(lifetime="global") - padding
  assert once.tier("pool") == 3 * 1_351_680  # the report's figure for 20 windows
  assert sum(once.tier(tier) for tier in ("resident", "call")) == once.bytes()
  scales = {line.component: line.scales / (line.values + line.scales) for line in once.lines}
  assert scales["main_kv"] == 32 / 288 and scales["index_keys"] == 4 / 68
  decoded = json.loads(table.to_json())
  assert sum(line["total"] for line in decoded["lines"]) == table.bytes()
  assert decoded["bytes_per_token"] == 890


def test_padding_is_that_of_the_last_page():
  whole, more = (footprint(RELEASED, context=n, page=256) for n in (512, 513))
  assert sum(line.padding for line in whole.lines) == 0
  # Three sources have no whole group of the last token yet: 255 and a half groups are empty.
  assert sum(line.padding for line in more.lines) == 3 * 128 * 356 + 255 * 356


def test_it_shows_itself():
  table = footprint(RELEASED)
  assert "main_kv" in str(table) and "890" in str(table)
  assert "window_encoder" in table._repr_html_()
  assert table.plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "arguments, message",
  [
    ({"context": 0}, "context: is 0"),
    ({"context": 1 << 21}, "has 1048576 positions"),
    ({"batch": True}, "batch: is True"),
    ({"replicas": -1}, "replicas: is -1"),
    ({"page": 12}, "must be a multiple of 8"),
    ({"page": 0}, "page: is 0"),
    ({"page": "x"}, "page: is 'x'"),
    ({"precision": ["fp8"]}, r"precision: is \['fp8'\]"),
    ({"precision": "fp5"}, "precision.main_kv: is 'fp5'"),
    ({"precision": {"kv": "fp8"}}, "precision: has 'kv'"),
    ({"precision": {"plain_kv": "fp8"}}, "precision.plain_kv: is 'fp8'"),
  ],
)
def test_arguments_that_do_not_fit(arguments, message):
  with pytest.raises(ConfigError, match=message):
    footprint(RELEASED, **arguments)


@pytest.mark.parametrize("model", [None, 5, {}])
def test_what_is_no_model(model):
  with pytest.raises(ConfigError, match="model: is a"):
    footprint(model)


def test_a_model_that_keeps_nothing_that_grows(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(
    '{"model_type": "mistral", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8,'
    ' "num_key_value_heads": 1, "sliding_window": 4}'
  )
  table = footprint(path, context=1)
  assert table.per_token == 0 and table.plot()._repr_png_()


def test_what_cannot_be_verified():
  with pytest.raises(ConfigError, match="cannot be allocated"):
    footprint(HF / "deepseek-v3.json").verify()
  with pytest.raises(ConfigError, match="would allocate"):
    footprint(RELEASED, context=1 << 20, batch=64).verify()


def test_a_config_object_and_its_file_are_the_same():
  path = str(ROOT / "configs" / "tiny.py")
  config = config_file.load(path)
  assert isinstance(config, Config) and isinstance(config.data, DataConfig)
  for source in (config, config.model):
    assert footprint(source).to_dict()["lines"] == footprint(path).to_dict()["lines"]
