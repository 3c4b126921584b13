"""The state of training as one value, and the step that maps it to the next.

Everything that decides the future is in `TrainState` and the data position. A step draws nothing at
random; one that comes to do so draws from (train.seed, state.step), so that no generator need be
stored. A step whose loss or gradient is not finite changes nothing, and neither do the steps after
it: the state stays as good as it was until the host, which reads results some steps later, finds
out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from hysparse import checkpoints
from hysparse.config import Config
from hysparse.training import optimizer as optimizer_lib

_ROUTER_BIAS = re.compile(r"runs/(\d+)/ffn/gate/(bias|bias_image)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Arrays by name, see checkpoints.named.

  Attributes:
    params: what the gradient trains, float32.
    buffers: what it does not: router biases (moved by load), the Engram id map.
    opt_state: of optax.
    step: updates applied, int32.
    bad_step: the first step refused because it was not finite (counted from 1), or 0.
  """

  params: dict[str, Array]
  buffers: dict[str, Array]
  opt_state: PyTree[Array]
  step: Int[Array, ""]
  bad_step: Int[Array, ""]


class LossFn(Protocol):
  """`training.losses.loss_fn`, or a stand-in of a test."""

  def __call__(
    self,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    buffers: nnx.State,
    batch: Mapping[str, Array],
    config: Config,
  ) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss, and scalars to record beside "load", float32 [layers, E]: tokens per expert."""


class Trainer:
  """A model, its loss and its optimizer: what the step needs besides state and batch."""

  def __init__(self, config: Config, graphdef: nnx.GraphDef, abstract: nnx.State, loss_fn: LossFn):
    """
    Args:
      config: of the experiment.
      graphdef: the model's structure.
      abstract: its state as shapes and dtypes.
      loss_fn: see LossFn.

    Raises:
      UnknownParameterError: a parameter without a group in optimizer.py.
    """
    self.config = config
    self._graphdef = graphdef
    self._params, self._buffers = nnx.split_state(abstract, nnx.Param, ...)
    self._loss_fn = loss_fn
    self._optimizer = optimizer_lib.build(
      config.optim, config.train.steps, checkpoints.named(self._params)
    )

  def init(self, model_state: nnx.State) -> TrainState:
    """The state before the first step, from an initialised model (or its shapes)."""
    params, buffers = map(checkpoints.named, nnx.split_state(model_state, nnx.Param, ...))
    # Two arrays of their own: a donated state may not hold one array twice.
    step, bad_step = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(params, buffers, self._optimizer.init(params), step, bad_step)

  def model_state(self, state: TrainState) -> nnx.State:
    """Parameters and buffers as the model takes them."""
    return nnx.merge_state(
      checkpoints.unnamed(state.params, self._params),
      checkpoints.unnamed(state.buffers, self._buffers),
    )

  @functools.cached_property
  def compiled(self) -> Callable[[TrainState, Mapping[str, Array]], tuple[TrainState, dict]]:
    """`step` under jit; the state given to it is donated."""
    return jax.jit(self.step, donate_argnums=0)

  def step(
    self, state: TrainState, batch: Mapping[str, Array]
  ) -> tuple[TrainState, dict[str, Array]]:
    """One update.

    Args:
      state: before.
      batch: arrays [B, S] of training/data.

    Returns:
      The next state and scalars: "loss", "grad_norm" (before clipping), "lr", "load_peak" (the
      busiest expert's load over the mean, worst layer), "bad_step" and what the loss reports.
    """
    config = self.config

    def loss(params: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
      return self._loss_fn(
        self._graphdef,
        checkpoints.unnamed(params, self._params),
        checkpoints.unnamed(state.buffers, self._buffers),
        batch,
        config,
      )

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    load = aux.pop("load")
    grad_norm = optax.tree.norm(grads)
    healthy = jnp.isfinite(value) & jnp.isfinite(grad_norm) & (state.bad_step == 0)

    updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
    after = TrainState(
      optax.apply_updates(state.params, updates),
      balance(state.buffers, load, config.train.balance_rate),
      opt_state,
      state.step + 1,
      state.bad_step,
    )
    before = dataclasses.replace(
      state, bad_step=jnp.where(state.bad_step == 0, state.step + 1, state.bad_step)
    )
    after = jax.tree.map(lambda new, old: jnp.where(healthy, new, old), after, before)
    lr = optimizer_lib.learning_rate(config.optim, config.train.steps)(state.step)
    return after, {
      **aux,
      "loss": value,
      "grad_norm": grad_norm,
      "lr": jnp.asarray(lr, jnp.float32),
      "load_peak": jnp.max(load.max(-1) / jnp.maximum(load.mean(-1), 1e-9)),
      "bad_step": after.bad_step,
    }


def balance(
  buffers: Mapping[str, Array], load: Float[Array, "layers *kinds E"], rate: float
) -> dict[str, Array]:
  """Moves each router bias by `rate` towards its expert's fair share, by the sign of the gap.

  The loads of a model with vision are apart, [layers, 2, E]: text moves one bias, images the other.

  Source: arXiv 2609.19969, load balance without a gradient.
  """
  gap = jnp.sign(load.mean(-1, keepdims=True) - load) * rate
  gap = gap.reshape(len(gap), -1, gap.shape[-1])  # [layers, kinds, E]
  moved, first = dict(buffers), {"bias": 0, "bias_image": 0}
  found = filter(None, map(_ROUTER_BIAS.fullmatch, buffers))
  for match in sorted(found, key=lambda match: int(match[1])):
    name, kind = match[0], match[2]
    layers = len(buffers[name])
    of_kind = gap[:, 0 if kind == "bias" else 1]
    moved[name] = buffers[name] + of_kind[first[kind] : first[kind] + layers]
    first[kind] += layers
  return moved


@jax.jit
def all_finite(arrays: Mapping[str, Float[Array, "..."]]) -> Bool[Array, ""]:
  """Whether none holds an infinity or a NaN: what a step checks are loss and gradient only."""
  return jnp.stack([jnp.isfinite(x).all() for x in arrays.values()]).all()
