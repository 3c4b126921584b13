"""The description of the attention state: byte rules, the released table, closed forms, arrays."""

import dataclasses
import math
import pathlib
from fractions import Fraction

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import config_file
from hysparse.cache.layout import layout, stored_row
from hysparse.config import ConfigError

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def released():
  return config_file.load(str(CONFIGS / "v41_flash.py")).model


@pytest.fixture(scope="module")
def tiny():
  return config_file.load(str(CONFIGS / "tiny.py")).model


def row_bytes(format, width):
  return sum(part.bytes for part in stored_row(format, width))


# Bytes per entry of the released widths, from the report's formats.
TABLE = {
  512: {"fp4": 288, "mxfp4": 272, "fp8": 528, "bf16": 1024, "f32": 2048},
  128: {"fp4": 72, "mxfp4": 68, "fp8": 132, "bf16": 256, "f32": 512},
}


@pytest.mark.parametrize("width", TABLE)
@pytest.mark.parametrize("format", ["fp4", "mxfp4", "fp8", "bf16", "f32"])
def test_the_table_of_the_precision_dial(width, format):
  assert row_bytes(format, width) == TABLE[width][format]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 3000))
def test_any_width_rounds_half_bytes_and_blocks_up(width):
  nibbles = width // 2 + (width % 2 > 0)
  of_16 = width // 16 + (width % 16 > 0)
  of_32 = width // 32 + (width % 32 > 0)
  assert row_bytes("fp4", width) == nibbles + of_16
  assert row_bytes("mxfp4", width) == nibbles + of_32
  assert row_bytes("fp8", width) == width + of_32
  assert row_bytes("bf16", width) == 2 * width
  assert row_bytes("f32", width) == 4 * width


@pytest.mark.parametrize(
  "format, parts",
  [
    ("fp4", [("codes", (17,), "uint8"), ("scales", (3,), "uint8")]),
    ("mxfp4", [("codes", (17,), "uint8"), ("scales", (2,), "uint8")]),
    ("fp8", [("codes", (33,), "uint8"), ("scales", (2,), "uint8")]),
    ("bf16", [("values", (33,), "bfloat16")]),
    ("f32", [("values", (33,), "float32")]),
  ],
)
def test_codes_and_scales_are_arrays_of_their_own(format, parts):
  assert [(p.name, p.shape, p.dtype) for p in stored_row(format, 33)] == parts


def test_the_released_model_keeps_890_bytes_a_token(released):
  state = layout(released)
  assert state.global_bytes_per_token == 890
  kv = {c.layers: c for c in state.named("main_kv")}
  assert set(kv) == {(2, 8, 14), (20,)}
  assert kv[2, 8, 14].rows_per_token == Fraction(1, 2)
  assert sum(c.bytes_per_token for c in kv.values()) == Fraction(5, 2) * 288
  assert sum(c.bytes_per_token for c in state.named("index_keys")) == Fraction(5, 2) * 68


def test_the_released_bounded_state(released):
  state = layout(released)
  windows = {c.name: c.bytes_at(0) for c in state if c.name.startswith("window")}
  assert windows == {
    "window_encoder": 1_351_680,
    "window_decoder": 1_351_680,
    "window_draft": 202_752,
  }
  (partial,) = state.named("partial_group")
  assert (partial.layers, partial.bytes_at(0)) == ((2, 8, 14), 3 * 2 * 512 * 4)
  (history,) = state.named("engram_history")
  assert history.bytes_at(0) == 3 * 4
  bounded = 2 * 1_351_680 + 202_752 + 12_288 + 12
  assert state.bounded_bytes == bounded
  assert state.bytes_at("bounded", 1_000_000) == bounded


@pytest.mark.parametrize(
  "main_kv, index_k, expected",
  [("fp8", "fp8", 1650), ("fp8", "mxfp4", 1490), ("bf16", "f32", 3840)],
)
def test_the_dial_changes_the_bytes(released, main_kv, index_k, expected):
  changed = dataclasses.replace(released, main_kv=main_kv, index_k=index_k)
  assert layout(changed).global_bytes_per_token == expected


def test_bookkeeping_and_scratch_have_their_own_lines(released):
  state = layout(released, block_tokens=256, call_tokens=6)
  tags, table, status = state.of("bookkeeping")
  assert tags.bytes_at(10**6) == 43 * 128 * 4
  assert [table.bytes_at(n) for n in (0, 1, 256, 257)] == [0, 4, 4, 8]
  assert status.bytes_at(10**6) == 4 + 1
  keys, groups, tokens = state.of("scratch")
  assert keys.bytes_at(10**6) == 43 * 6 * 528
  assert groups.bytes_at(10**6) == 3 * 6 * 2 * 512 * 4
  assert tokens.bytes_at(10**6) == 6 * 4
  assert state.global_bytes_per_token == 890


def test_an_incomplete_group_has_no_entry(released):
  state = layout(released)
  per_entry = 288 + 68
  assert state.bytes_at("global", 1) == per_entry  # layer 20 only
  assert state.bytes_at("global", 2) == 4 * per_entry + per_entry
  assert state.bytes_at("global", 3) == 3 * per_entry + 3 * per_entry


@pytest.mark.parametrize("schedule", ["mha*3", "gqa/2*3", "mha gqa/2 gqa/1"])
def test_plain_layers_keep_keys_and_values_of_every_token(tiny, schedule):
  config = dataclasses.replace(tiny, schedule=schedule, engram_layers=())
  state = layout(config)
  heads = {"mha": 4, "gqa/2": 2, "gqa/1": 1}
  words = schedule.split() if " " in schedule else [schedule.removesuffix("*3")] * 3
  assert state.global_bytes_per_token == sum(2 * heads[word] * 32 * 2 for word in words)
  assert state.bounded_bytes == 0
  assert [c.name for c in state.of("bookkeeping")] == ["block_table", "status"]


def test_a_dense_source_stores_index_keys_only_when_they_are_scored(tiny):
  alone = layout(dataclasses.replace(tiny, schedule="dense/2 reuse", engram_layers=()))
  assert not alone.named("index_keys")
  scored = layout(dataclasses.replace(tiny, schedule="dense/2 reindex", engram_layers=()))
  assert [c.layers for c in scored.named("index_keys")] == [(0,)]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
  st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4),
  st.integers(0, 5000),
  st.sampled_from(["fp4", "mxfp4", "fp8", "bf16", "f32"]),
)
def test_closed_form_for_any_ratios(tiny, ratios, tokens, format):
  schedule = " ".join(f"swa full/{r} reuse" for r in ratios)
  config = dataclasses.replace(
    tiny, schedule=schedule, engram_layers=(), main_kv=format, index_k="bf16", window_kv="f32"
  )
  state = layout(config)
  entry = row_bytes(format, 32) + 32 * 2
  assert state.bytes_at("global", tokens) == sum(tokens // r * entry for r in ratios)
  pending = sum((r - 1) * 2 * 32 * 4 for r in ratios)
  assert state.bounded_bytes == 3 * len(ratios) * 32 * 32 * 4 + pending


def test_described_arrays_have_the_described_bytes(released):
  for component in layout(released):
    sizes = {"layers": 7, "batch": 3, "rows": 5, "pool": 11}
    leading = tuple(sizes[axis] for axis in component.axes)
    shapes = [(part, component.shape(part, sizes)) for part in component.row]
    assert all(shape[: len(leading)] == leading for _, shape in shapes)
    stored = sum(math.prod(shape) * jnp.dtype(part.dtype).itemsize for part, shape in shapes)
    assert stored == math.prod(leading) * component.row_bytes


def test_blocks_hold_whole_groups(tiny, released):
  assert layout(tiny).block_tokens % tiny.alignment == 0
  assert layout(released).block_tokens == 128
  with pytest.raises(ConfigError, match="block_tokens: is 100; must be a multiple of 8"):
    layout(tiny, block_tokens=100)
