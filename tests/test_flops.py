"""FLOPs: counts by hand, visibility by brute force, and sums that must agree with each other."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import config_file
from hysparse.config import Config
from hysparse.flops import forward_dots, forward_flops, loss_dots, train_step_flops
from hysparse.nn.batch import Batch
from hysparse.nn.model import Model, abstract
from hysparse.parameters import weights
from hysparse.training.losses import loss_fn

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
MIXED = "swa full/3 reuse dense/2 reuse mha gqa/2 | full/1+candidates reuse reindex reuse"


def model(name, **changes):
  return dataclasses.replace(config_file.load(str(CONFIGS / f"{name}.py")).model, **changes)


def mixed(**changes):
  """All modes, with a window, a selection and a pool that are all smaller than what is visible."""
  options = {
    "schedule": MIXED,
    "engram_layers": (1,),
    "window": 5,
    "top_k": 7,
    "candidate_blocks": 3,
    "candidate_block_size": 4,
  }
  return model("tiny", **{**options, **changes})


def rows(dots):
  return {(dot.layer, dot.part, dot.name): dot.rows for dot in dots}


# --- What a query may see, written out query by query ------------------------------------------


def visible_entries(t, ratio):
  """Complete groups at token t."""
  return [j for j in range(t + 1) if (j + 1) * ratio - 1 <= t]


def pool(entries, blocks, size):
  """Entries of the newest block and of any other blocks - 1: their number is the same."""
  kept = sorted({j // size for j in entries})[-blocks:]
  return [j for j in entries if j // size in kept]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(1, 40), st.data())
def test_causal_counts_are_what_a_query_may_see(seq_len, data):
  start = data.draw(st.integers(0, seq_len - 1))
  config = mixed()
  counted = rows(forward_dots(config, seq_len, start=start))
  queries = range(start, seq_len)
  K = config.top_k

  def pairs(reach):
    return sum(len(reach(t)) for t in queries)

  for layer, spec in enumerate(config.layers):
    if spec.has_window:
      window = pairs(lambda t: range(max(0, t - 4), t + 1))
      assert counted[layer, "window_attention", "scores"] == window
    if spec.mode in ("mha", "gqa"):
      assert counted[layer, "dense_attention", "values"] == pairs(lambda t: range(t + 1))
    if spec.mode == "dense":
      every = pairs(lambda t: visible_entries(t, 2))
      assert counted[layer, "dense_attention", "scores"] == every
      assert counted[layer, "dense_attention", "oracle scores"] == every
  in_pool = lambda t: pool(visible_entries(t, 1), 3, 4)  # noqa: E731
  assert counted[1, "indexer", "scores"] == pairs(lambda t: visible_entries(t, 3))
  assert counted[7, "indexer", "scores"] == pairs(lambda t: visible_entries(t, 1))
  assert counted[9, "indexer", "scores"] == pairs(in_pool)
  for layer, reach in (
    (1, lambda t: visible_entries(t, 3)),
    (2, lambda t: visible_entries(t, 3)),
    (4, lambda t: visible_entries(t, 2)),
    (8, lambda t: visible_entries(t, 1)),
    (9, in_pool),
    (10, in_pool),
  ):
    attended = sum(min(K, len(reach(t))) for t in queries)
    assert counted[layer, "selected_attention", "scores"] == attended
  finished = [j for j in range(seq_len) if start <= 3 * j + 2 < seq_len]
  assert counted[1, "indexer", "wk"] == len(finished)


def test_the_mixed_model_drops_entries_of_every_kind():
  causal, every = (rows(forward_dots(mixed(), 40, visible)) for visible in ("causal", "all"))
  assert causal[9, "indexer", "scores"] < causal[7, "indexer", "scores"]
  seen = sum(len(visible_entries(t, 1)) for t in range(40))
  assert causal[8, "selected_attention", "scores"] < seen
  assert all(every[key] >= causal[key] for key in causal)


def test_an_unblocked_implementation_computes_every_row():
  config = mixed(top_k=7)
  counted = rows(forward_dots(config, 30, "all"))
  assert counted[0, "window_attention", "scores"] == 30 * 5
  assert counted[1, "indexer", "scores"] == 30 * 10
  assert counted[9, "indexer", "scores"] == 30 * 30
  assert counted[1, "selected_attention", "values"] == 30 * 7
  assert counted[3, "dense_attention", "scores"] == 30 * 15
  assert counted[5, "dense_attention", "scores"] == 30 * 30
  short = rows(forward_dots(config, 9, "all"))
  assert short[1, "selected_attention", "scores"] == 9 * 3  # there are no more entries


# --- Sums ----------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(1, 60), st.integers(1, 60))
def test_a_sequence_costs_what_its_chunks_cost(first, second):
  config = mixed()
  whole = forward_flops(config, first + second)
  head, tail = forward_flops(config, first), forward_flops(config, first + second, start=first)
  assert whole == {part: head[part] + tail[part] for part in whole}


@pytest.mark.parametrize("name", ["tiny", "small", "v41_flash"])
def test_matrices_cost_two_flops_for_each_active_parameter(name):
  config = model(name)
  tokens = 64
  dots = {(dot.layer, dot.part, dot.name): dot for dot in forward_dots(config, tokens)}
  for weight in weights(config):
    dot = dots.get((weight.layer, weight.part, weight.name))
    if weight.times is None:
      assert dot is None
      continue
    factor = tokens if weight.times == "token" else tokens // config.layers[weight.layer].ratio
    assert dot.flops == 2 * weight.active * factor


def test_one_decoded_token_of_the_released_model_by_hand():
  context = 1_048_576
  counted = forward_flops(model("v41_flash"), context, start=context - 1)
  heads = 64 * 512
  assert counted["window_attention"] == 2 * 2 * 40 * 128 * heads
  assert counted["selected_attention"] == 2 * 2 * 38 * 512 * heads
  scored = 3 * (context // 2) + context + 4 * 2048 * 8
  projections = 8 * (1280 * 32 * 128 + 5120 * 32) + 4 * 512 * 128
  assert counted["indexer"] == 2 * (scored * (32 * 128 + 32) + projections)
  assert counted["experts"] == 2 * 40 * 7 * 3 * 5120 * 2304
  assert counted["head"] == 2 * 5120 * 129_280
  assert counted["engram"] == 2 * 2 * (6144 * 25_600 + 4 * 5120)
  mixes = 80 * (24 * 4 * 5120 + 4 * 5120 + 16 * 5120) + 4 * 5120
  assert counted["streams"] == 2 * mixes


def test_training_is_three_forwards_of_what_is_differentiated():
  config, S = mixed(), 24
  dots = list(forward_dots(config, S))
  selecting = {(d.part, d.name) for d in dots if d.backward == 0}
  assert selecting == {
    ("indexer", "scores"),
    ("indexer", "weighted sum"),
    ("dense_attention", "oracle scores"),
  }
  once = {(d.part, d.name) for d in dots if d.backward == 1}
  inputs_detached = {("indexer", "wk"), ("indexer", "wq_b"), ("indexer", "weights_proj")}
  assert once == inputs_detached | {("streams", "attn fold")}
  forward = sum(d.flops for d in dots)
  not_again = sum((2 - d.backward) * d.flops for d in dots)
  kl = sum(d.flops for d in loss_dots(config, S))
  score = config.index_heads * config.index_dim + config.index_heads
  every = sum(d.flops for d in loss_dots(config, S, "all"))
  assert every == 2 * S * score * 3 * config.top_k
  assert train_step_flops(config, 5, S) == 5 * (3 * forward - not_again + 3 * kl)


def test_plain_residuals_cost_nothing_and_no_scheme_lacks_a_part():
  plain = forward_flops(mixed(residual="plain", streams=1), 16)
  assert "streams" not in plain
  assert set(forward_flops(mixed(), 16)) == {
    "attention", "compressor", "indexer", "engram", "router", "experts", "streams", "head",
    "window_attention", "selected_attention", "dense_attention",
  }  # fmt: skip


# --- The model itself ----------------------------------------------------------------------------

# Sums that the reference writes as elementwise products, so they are no products of matrices there.
ELEMENTWISE = {("engram", "gate"), ("indexer", "weighted sum"), ("indexer_loss", "weighted sum")}


def traced_flops(jaxpr):
  """FLOPs of all matrix products in a traced function, two a multiply-add."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
      total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
    for parameter in equation.params.values():
      inner = getattr(parameter, "jaxpr", parameter)
      total += traced_flops(inner) if hasattr(inner, "eqns") else 0
  return total


@pytest.mark.parametrize(
  "residual, streams, schedule",
  [
    pytest.param("single_pass", 4, MIXED.replace("full/3", "full/4"), marks=pytest.mark.slow),
    ("two_pass", 3, "swa full/2 reuse"),
    ("plain", 1, "swa full/2 reuse"),
  ],
)
def test_the_reference_model_has_exactly_these_products(residual, streams, schedule):
  small = {
    "n_experts": 2,
    "experts_per_token": 2,
    "sinkhorn_iters": 2,
    "d_model": 64,
    "expert_dim": 32,
    "window": 16,
  }
  config = mixed(residual=residual, streams=streams, schedule=schedule, **small)
  values = config_file.load(str(CONFIGS / "tiny.py"), ["train.backend=reference"]).to_dict()
  values["train"]["scan_layers"] = False
  values["model"] = dataclasses.asdict(config)
  graphdef, state = abstract(Config.from_dict(values))
  params, buffers = nnx.split_state(state, nnx.Param, ...)

  def loss(params, buffers, tokens):
    model: Model = nnx.merge(graphdef, params, buffers)
    hidden = model.hidden(Batch.of(tokens))
    return model.logits(hidden.x_BxSxD).sum() + hidden.aux.indexer_loss.sum()

  B, S = 2, 64
  arguments = params, buffers, jax.ShapeDtypeStruct((B, S), jnp.int32)
  dots = [*forward_dots(config, S, "all"), *loss_dots(config, S, "all")]
  counted = [dot for dot in dots if (dot.part, dot.name) not in ELEMENTWISE]
  forward = jax.make_jaxpr(loss)(*arguments).jaxpr
  assert traced_flops(forward) == B * sum(dot.flops for dot in counted)
  training = jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr
  assert traced_flops(training) == B * sum(dot.flops * (1 + dot.backward) for dot in counted)


# --- XLA's own count -----------------------------------------------------------------------------

# What the analytic count leaves out: norms, softmax, RoPE, activations and the stream mixes' and
# gathers' elementwise work, a few per cent at this width.
XLA_TOLERANCE = 0.03


@pytest.mark.slow
def test_the_count_is_what_xla_counts_for_a_plain_model():
  """Forward and gradient of the training loss, unrolled and unblocked, experts gathered."""
  wide = ["d_model=512", "q_rank=256", "head_dim=64", "o_rank=256", "expert_dim=256"]
  plain = ["train.backend=reference", "train.scan_layers=False"]
  length = 256
  sizes = [f"data.seq_len={length}", f"train.loss_block={length}"]
  overrides = [f"model.{field}" for field in wide] + plain + sizes
  config = config_file.load(str(CONFIGS / "tiny.py"), overrides)
  graphdef, state = abstract(config)
  params, buffers = nnx.split_state(state, nnx.Param, ...)
  whole = jax.ShapeDtypeStruct((1, length), jnp.int32)
  flags = jax.ShapeDtypeStruct((1, length), jnp.bool_)
  arrays = dict.fromkeys(("tokens", "targets", "positions"), whole)
  arrays |= dict.fromkeys(("mask", "valid", "is_prompt"), flags)

  def loss(params, buffers, arrays):
    return loss_fn(graphdef, params, buffers, arrays, config)[0]

  def counted_by_xla(function):
    compiled = jax.jit(function).lower(params, buffers, arrays).compile()
    return compiled.cost_analysis()["flops"]

  parts = forward_flops(config.model, length, "all")
  forward = sum(parts.values())
  forward += sum(dot.flops for dot in loss_dots(config.model, length, "all"))
  step = train_step_flops(config.model, 1, length, "all")
  assert forward == pytest.approx(counted_by_xla(loss), rel=XLA_TOLERANCE)
  assert step == pytest.approx(counted_by_xla(jax.grad(loss)), rel=XLA_TOLERANCE)
