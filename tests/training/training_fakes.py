"""A small stand-in for the model, its loss and its data, with the interfaces that training uses."""

import io
import signal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hysparse.checkpoints import Checkpoints
from hysparse.config import Config
from hysparse.training import loop, metrics, progress
from hysparse.training import state as state_lib

V, D, E, F = 17, 8, 4, 8
LAYERS = (2, 1)  # of each run


class RouterBias(nnx.Variable):
  """As the model's: no parameter, moved by load."""


class TokenMap(nnx.Variable):
  """A buffer that nothing moves."""


class Leaf(nnx.Module):
  def __init__(self, **variables):
    for name, value in variables.items():
      setattr(self, name, value)


def _normal(rng: np.random.Generator, *shape: int) -> nnx.Param:
  return nnx.Param(jnp.asarray(0.3 * rng.standard_normal(shape, np.float32)))


class FakeModel(nnx.Module):
  """Embedding, MoE layers in stacked runs, head; routing by gate and bias."""

  def __init__(self, seed: int):
    rng = np.random.default_rng(seed)
    self.embed = Leaf(weight=_normal(rng, V, D))
    self.token_map = Leaf(map=TokenMap(jnp.arange(V, dtype=jnp.int32)))
    self.runs = nnx.List(
      [
        Leaf(
          ffn_norm=Leaf(weight=nnx.Param(jnp.ones((n, D)))),
          ffn=Leaf(
            gate=Leaf(weight=_normal(rng, n, E, D), bias=RouterBias(jnp.zeros((n, E)))),
            experts=Leaf(w1=_normal(rng, n, E, D, F), w2=_normal(rng, n, E, F, D)),
          ),
        )
        for n in LAYERS
      ]
    )
    self.norm = Leaf(weight=nnx.Param(jnp.ones((D,))))  # no loss depends on it
    self.head = Leaf(weight=_normal(rng, D, V))

  def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, loads = self.embed.weight[...][tokens], []
    for run, n in zip(self.runs, LAYERS, strict=True):
      for i in range(n):
        h = x * run.ffn_norm.weight[...][i]
        scores = jax.nn.sigmoid(h @ run.ffn.gate.weight[...][i].T)
        chosen = jax.nn.one_hot(jnp.argmax(scores + run.ffn.gate.bias[...][i], -1), E)
        inner = jnp.tanh(jnp.einsum("bsd,edf->bsef", h, run.ffn.experts.w1[...][i]))
        y = jnp.einsum("bsef,efd->bsed", inner, run.ffn.experts.w2[...][i])
        x = x + jnp.einsum("bsed,bse->bsd", y, chosen * scores)
        loads.append(chosen.sum((0, 1)))
    return x @ self.head.weight[...], jnp.stack(loads)


def create(config: Config, seed: int):
  return nnx.split(FakeModel(seed))


def abstract(config: Config):
  return nnx.split(nnx.eval_shape(lambda: FakeModel(0)))


def loss_fn(graphdef, params, buffers, batch, config):
  logits, load = nnx.merge(graphdef, params, buffers)(batch["tokens"])
  nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
  # The fault of a test travels with the batch: such a loss (and its gradient) is not finite.
  fault = jnp.where(batch["tokens"][0, 0] == V - 1, jnp.nan, 1.0)
  return jnp.mean(nll) * fault, {"load": load, "perplexity": jnp.exp(jnp.mean(nll))}


class FakeData:
  """Batches drawn from their index; `faulty` ones make the loss NaN."""

  def __init__(self, faulty: tuple[int, ...] = ()):
    self._index, self._faulty = 0, faulty

  def __next__(self) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(self._index)
    tokens = rng.integers(0, V - 1, (2, 9), dtype=np.int32)
    if self._index in self._faulty:
      tokens[0, 0] = V - 1
    self._index += 1
    everywhere = np.ones((2, 8), bool)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "valid": everywhere}

  def get_state(self) -> dict:
    return {"index": self._index}

  def set_state(self, state) -> None:
    self._index = state["index"]


class SignallingData(FakeData):
  """Sends this process signals while it makes the batch of a step."""

  def __init__(self, step: int, *numbers: int):
    super().__init__()
    self._step, self._numbers = step, numbers

  def __next__(self) -> dict[str, np.ndarray]:
    batch = super().__next__()
    if self._index == self._step:
      for number in self._numbers:
        signal.raise_signal(number)  # handled before it returns
    return batch


def config(**groups) -> Config:
  """A small legal config; groups override fields: train={"steps": 3}."""
  values = {
    "model": {
      "schedule": "swa", "vocab_size": V, "d_model": D, "n_heads": 1, "head_dim": D, "rope_dim": 2,
      "q_rank": D, "o_groups": 1, "o_rank": D, "window": 4, "top_k": 1, "n_experts": E,
      "experts_per_token": 1, "expert_dim": F,
    },
    "data": {"seq_len": 8, "batch_size": 2},
    "optim": {"lr": 1e-2, "warmup_steps": 2},
    "train": {"steps": 8, "log_every": 2, "checkpoint_every": 3, "balance_rate": 0.05},
    "eval": {"every": 4},
  }  # fmt: skip
  for group, fields in groups.items():
    values[group] = {**values[group], **fields}
  return Config.from_dict(values)


_compiled: dict[tuple, object] = {}  # steps that differ in nothing share one compilation


class Run:
  """One process's share of a run in a workdir: made anew for every restart."""

  def __init__(self, workdir, config: Config, data: FakeData | None = None):
    self.told = io.StringIO()
    self.evaluated: list[int] = []
    self.ended: list[int] = []
    graphdef, shapes = abstract(config)
    trainer = state_lib.Trainer(config, graphdef, shapes, loss_fn)
    trainer.compiled = _compiled.setdefault(
      (config.optim, config.train.steps, config.train.balance_rate), trainer.compiled
    )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
      jax.eval_shape(trainer.init, shapes),
    )
    self.data = data or FakeData()
    console = progress.Console(self.told)
    self.checkpoints = Checkpoints(workdir, config.train.keep_checkpoints, console.say)
    if restored := self.checkpoints.restore(like):
      self.data.set_state(restored.position)
      self.first, state = restored.step, restored.state
    else:
      self.first, state = 0, trainer.init(create(config, config.train.seed)[1])
    self.metrics = metrics.Metrics(workdir, self.first)
    callbacks = loop.Callbacks(self._evaluate, lambda state: self.ended.append(int(state.step)))
    self.loop = loop.Loop(
      trainer, state, self.data, workdir, self.metrics, self.checkpoints, console, callbacks
    )

  def __call__(self) -> bool:
    try:
      return self.loop.run()
    finally:
      self.metrics.close()
      self.checkpoints.close()

  def _evaluate(self, state) -> dict[str, float]:
    self.evaluated.append(int(state.step))
    # A digest of the parameters stands in for a held-out loss.
    return {"norm": float(sum(np.abs(np.asarray(x)).sum() for x in state.params.values()))}


def arrays(state: state_lib.TrainState) -> dict[str, np.ndarray]:
  """Everything in the state by path."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def records(workdir) -> list[dict]:
  """metrics.jsonl without what depends on the clock."""
  return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in metrics.read(workdir)]
