"""The models of configs/bench/: as large as their peer, and variants where they say so."""

import json
import pathlib

import pytest

from hysparse import config_file
from hysparse.parameters import parameters

ROOT = pathlib.Path(__file__).parents[2]
BENCH = ROOT / "configs" / "bench"

# Parameters that the peer reports (scripts/bench_peers/deepseek_v4.py), and how far ours may be
# off: the peer's compressors and indexers project twice as wide, 1.2 % of the model.
PEER_PARAMETERS = 31_711_189
PARAMETERS_RTOL = 0.015

SAME = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_attention_heads": "n_heads",
  "head_dim": "head_dim",
  "q_lora_rank": "q_rank",
  "o_groups": "o_groups",
  "o_lora_rank": "o_rank",
  "sliding_window": "window",
  "index_n_heads": "index_heads",
  "index_head_dim": "index_dim",
  "index_topk": "top_k",
  "n_routed_experts": "n_experts",
  "num_experts_per_tok": "experts_per_token",
  "n_shared_experts": "shared_experts",
  "moe_intermediate_size": "expert_dim",
  "hc_mult": "streams",
  "max_position_embeddings": "max_positions",
}


def load(name, *overrides):
  return config_file.load(str(BENCH / f"{name}.py"), overrides)


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_is_valid_and_can_be_overridden(path):
  assert load(path.stem, "model.top_k=3").model.top_k == 3


def test_inference_is_the_peer_in_every_size_that_both_have():
  model = load("inference").model
  peer = json.loads((ROOT / "scripts" / "bench_peers" / "deepseek_v4.json").read_text())
  assert {name: peer[name] for name in SAME} == {n: getattr(model, f) for n, f in SAME.items()}
  assert len(model.layers) == peer["num_hidden_layers"]
  assert model.rope_dim == peer["head_dim"] * peer["partial_rotary_factor"]
  # As many window layers, and as many that select as have an indexer there.
  kinds = peer["layer_types"]
  assert sum(s.mode == "swa" for s in model.layers) == kinds.count("sliding_attention")
  assert len(model.layers.index_sources) == kinds.count("compressed_sparse_attention")
  assert {s.mode for s in model.layers} == {"swa", "full", "reindex", "reuse"}
  assert not model.engram_layers and not model.draft_layers and not model.vision_layers
  assert sum(parameters(model).values()) == pytest.approx(PEER_PARAMETERS, rel=PARAMETERS_RTOL)


def test_replay_is_inference_cut_in_the_middle():
  replay, inference = load("replay"), load("inference")
  assert replay.model.layers.replay_unsupported_reason() is None
  assert replay.model.layers.decoder_start == len(replay.model.layers) // 2
  ours, base = replay.to_dict(), inference.to_dict()
  for field in ("schedule", "candidate_blocks"):
    assert ours["model"].pop(field) != base["model"].pop(field)
  assert ours == base
