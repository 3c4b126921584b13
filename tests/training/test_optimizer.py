"""Groups by name, the learning-rate curve, and the update against AdamW written out in NumPy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from flax import nnx
from training_fakes import config

from hysparse import checkpoints
from hysparse.config import OptimConfig
from hysparse.nn import model
from hysparse.nn.moe import RouterBias
from hysparse.training import optimizer
from hysparse.training.state import balance

# float32 moments against float64 ones over a few steps.
ADAM_TOLERANCE = 2e-6

# Which parameter belongs where, from the table of the report: (matrices to be orthogonalised
# whole, by head, by expert; balanced tables; AdamW with and without decay).
EXPECTED = {
  "matrices": [
    "runs/0/attn/wq_a/weight",
    "runs/0/attn/wv/weight",
    "runs/0/attn/output/wo_a/weight",
    "runs/0/attn/output/wo_b/weight",
    "runs/11/attn/compressor/wgate/weight",
    "runs/1/attn/indexer/weights_proj/weight",
    "runs/2/ffn/gate/weight",
    "runs/2/ffn/shared/w1/weight",
    "runs/2/ffn/shared/w2/weight",
    "runs/2/ffn/shared/w3/weight",
    "runs/1/engram/wkv/weight",
  ],
  "query and key": [
    "runs/0/attn/wq_b/weight",
    "runs/0/attn/wkv/weight",
    "runs/0/attn/wk/weight",
    "runs/0/attn/compressor/wkv/weight",
    "runs/0/attn/indexer/wq_b/weight",
    "runs/0/attn/index_keys/wk/weight",
  ],
  "experts": ["runs/3/ffn/experts/w1", "runs/3/ffn/experts/w2", "runs/3/ffn/experts/w3"],
  "engram tables": ["runs/1/engram/table"],
  "embedding": ["embed/weight"],
  "head": ["head/weight"],
  "norms": [
    "norm/weight",
    "runs/0/attn_norm/weight",
    "runs/0/ffn_norm/weight",
    "runs/0/attn/q_norm/weight",
    "runs/0/attn/kv_norm/weight",
    "runs/0/attn/compressor/norm/weight",
    "runs/0/attn/index_keys/k_norm/weight",
    "runs/0/engram/q_weight",
    "runs/0/engram/k_weight",
  ],
  "biases, sinks, streams": [
    "runs/0/attn/sink",
    "runs/0/hc_attn/fn",
    "runs/0/hc_attn/base",
    "runs/0/hc_ffn/scale",
  ],
  "drafts, vision": [
    "drafts/layers/attn/wq_a/weight",
    "drafts/markov/head",
    "vision/blocks/attn/wqkv/bias",
    "aligner/w1/weight",
    "image/start",
  ],
}
FROZEN = "drafts, vision"
DECAYED = {"matrices", "query and key", "experts", "norms"}
NAMES = [name for names in EXPECTED.values() for name in names]


def random_arrays(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {n: (scale * rng.standard_normal((3, 5))).astype(np.float32) for n in NAMES}


def test_every_name_has_the_group_of_the_report():
  found = {group: [n for n in NAMES if optimizer.group_of(n).name == group] for group in EXPECTED}
  assert found == EXPECTED
  assert {g.name for g in optimizer.GROUPS if g.decayed} == DECAYED


@pytest.mark.parametrize(
  "name", ["runs/0/attn/new/weight", "embed/weight/more", "runs/0/1/attn/sink", "embed"]
)
def test_an_unknown_parameter_is_refused_by_name(name):
  with pytest.raises(optimizer.UnknownParameterError, match=name):
    optimizer.build(OptimConfig(), 10, [*NAMES, name])


def test_a_parameter_of_two_groups_is_refused_by_name(monkeypatch):
  twice = optimizer.Group("second", ("embed/*",))
  monkeypatch.setattr(optimizer, "GROUPS", (*optimizer.GROUPS, twice))
  with pytest.raises(optimizer.UnknownParameterError, match=r"^embed/weight: .*'embedding' and 's"):
    optimizer.build(OptimConfig(), 10, NAMES)


def test_update_is_clipped_adamw_with_decay_and_rate_of_the_group():
  optim = OptimConfig(lr=0.02, warmup_steps=3, clip_norm=0.7, weight_decay=0.3, engram_lr=4.0)
  steps = 8
  transform = optimizer.build(optim, steps, NAMES)
  curve = optimizer.learning_rate(optim, steps)
  params = random_arrays(0)
  state = transform.init(params)
  expected = {n: p.astype(np.float64) for n, p in params.items()}
  m, v = ({n: np.zeros((3, 5)) for n in NAMES} for _ in range(2))
  for step in range(steps):
    # The first steps are below the clipping norm, the later ones above it.
    grads = random_arrays(100 + step, scale=0.01 if step < 4 else 1.0)
    updates, state = transform.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    factor = min(1.0, optim.clip_norm / norm)
    for group, names in EXPECTED.items():
      if group == FROZEN:
        continue
      lr = float(curve(step)) * (optim.engram_lr if group == "engram tables" else 1)
      decay = optim.weight_decay if group in DECAYED else 0.0
      for n in names:
        g = grads[n].astype(np.float64) * factor
        m[n] = optim.b1 * m[n] + (1 - optim.b1) * g
        v[n] = optim.b2 * v[n] + (1 - optim.b2) * g * g
        m_hat, v_hat = (x / (1 - b ** (step + 1)) for x, b in ((m[n], optim.b1), (v[n], optim.b2)))
        update = m_hat / (np.sqrt(v_hat) + optim.eps) + decay * expected[n]
        expected[n] = expected[n] - lr * update
  for n in NAMES:
    np.testing.assert_allclose(params[n], expected[n], rtol=ADAM_TOLERANCE, atol=ADAM_TOLERANCE)


def test_without_gradient_only_decayed_groups_move():
  transform = optimizer.build(OptimConfig(warmup_steps=0), 10, NAMES)
  params = random_arrays(1)
  zeros = {n: np.zeros_like(p) for n, p in params.items()}
  updates, _ = transform.update(zeros, transform.init(params), params)
  moved = {optimizer.group_of(n).name for n in NAMES if np.any(updates[n])}
  assert moved == DECAYED


@pytest.mark.parametrize("warm", [0, 1, 7, 60])
@pytest.mark.parametrize("shares", [(0.5, 0.8), (0.0, 1.0), (1.0, 1.0), (0.4, 0.4)])
def test_learning_rate_curve(warm, shares):
  constant, decay = shares
  optim = OptimConfig(
    lr=0.5, warmup_steps=warm, constant_share=constant, decay_share=decay, final_lr=0.1
  )
  steps = 40
  curve = optimizer.learning_rate(optim, steps)
  rates = np.asarray([float(curve(step)) for step in range(steps)])
  np.testing.assert_allclose(
    rates[:warm], 0.5 * (np.arange(min(warm, steps)) + 1) / max(warm, 1), rtol=1e-6
  )
  begin, end = (max(warm, round(share * steps)) for share in shares)
  np.testing.assert_allclose(rates[warm:begin], 0.5, rtol=1e-6)
  share = (np.arange(begin, end) - begin) / max(end - begin, 1)
  wave = 0.05 + 0.45 * (1 + np.cos(np.pi * share)) / 2
  np.testing.assert_allclose(rates[begin:end], wave[: max(0, steps - begin)], rtol=1e-5)
  np.testing.assert_allclose(rates[end + (begin == end) :], 0.05, rtol=1e-6)


def test_table_names_every_parameter_its_update_and_its_size():
  text = optimizer.describe(config().optim, {n: np.zeros((2, 3)) for n in NAMES})
  rows = {line.split("  ")[0]: line for line in text.splitlines()}
  for group, names in EXPECTED.items():
    lines = [line for line in text.splitlines() if line.startswith(group)]
    update = "none" if group == FROZEN else f"AdamW, decay {0.1 if group in DECAYED else 0:g}"
    assert lines and all(f"  {update}" in line for line in lines)
    for n in names:
      folded = "/".join(["runs", "*", *n.split("/")[2:]]) if n.startswith("runs") else n
      assert sum(f" {folded} " in line for line in lines) == 1, n
  assert "lr x5" in rows["engram tables"]
  assert rows["all"].split()[-1] == str(6 * len(NAMES))


SCHEDULES = (
  "swa full/2 reuse*2 | full/1+candidates reuse reindex reuse",
  "dense/1 reuse reindex",
  "mha gqa/2 swa",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("residual", ["single_pass", "plain"])
def test_every_parameter_of_the_model_has_one_group(schedule, residual):
  engram = (1,) if "full" in schedule else ()
  settings = small.config(schedule, residual=residual, engram_layers=engram)
  params, buffers = nnx.split_state(model.abstract(settings)[1], nnx.Param, ...)
  names = checkpoints.named(params)
  groups = {optimizer.group_of(name).name for name in names}
  assert {"matrices", "query and key", "experts", "embedding", "head", "norms"} <= groups
  assert ("engram tables" in groups) == bool(engram)
  # Every router bias is one that the step moves.
  loads = jnp.arange(len(settings.model.layers) * 4, dtype=jnp.float32).reshape(-1, 4)
  arrays = {n: jnp.zeros(x.shape, x.dtype) for n, x in checkpoints.named(buffers).items()}
  moved = balance(arrays, loads, 1.0)
  biases = checkpoints.named(nnx.filter_state(buffers, RouterBias))
  assert {n for n in arrays if np.any(moved[n] != arrays[n])} == set(biases)
  assert sum(len(arrays[n]) for n in biases) == len(settings.model.layers)
