"""Mixture of experts: a float32 router, routed experts, one shared expert.

Source: arXiv 2609.19969, section 2.5.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from hysparse_kernels import moe
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init, weights
from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.linear import Linear


class RouterBias(nnx.Variable):
  """Added to router scores for the choice only. No gradient: training moves it by sign of load."""


class Router(nnx.Module):
  """Weight [experts, width] of the router, its bias and, with vision, the one of image tokens."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    shape = (config.n_experts, config.d_model)
    self.weight = nnx.Param(init.table(rngs.params(), shape, config.d_model**-0.5))
    self.bias = RouterBias(jnp.zeros((config.n_experts,), jnp.float32))
    if config.vision_layers:
      self.bias_image = RouterBias(jnp.zeros((config.n_experts,), jnp.float32))


class Experts(nnx.Module):
  """Gate (w1), up (w3) and down (w2) matrices of all routed experts, each [E, inputs, outputs]."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    E, D, F = config.n_experts, config.d_model, config.expert_dim
    gain = init.residual_gain(len(config.layers))
    self.w1 = nnx.Param(init.matrix(rngs.params(), (E, D, F)))
    self.w3 = nnx.Param(init.matrix(rngs.params(), (E, D, F)))
    self.w2 = nnx.Param(init.matrix(rngs.params(), (E, F, D), gain))


class SwiGLU(nnx.Module):
  """The shared expert: always on, clamped like the others, without a routing weight."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    D, F = config.d_model, config.expert_dim
    gain, fp8 = init.residual_gain(len(config.layers)), run.official
    self.limit = config.swiglu_limit
    self.w1 = Linear(D, F, rngs=rngs, fp8_input=fp8)
    self.w3 = Linear(D, F, rngs=rngs, fp8_input=fp8)
    self.w2 = Linear(F, D, rngs=rngs, gain=gain, fp8_input=fp8)

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return self.w2(moe.swiglu(self.w1(x), self.w3(x), self.limit).astype(x.dtype))


class MoE(nnx.Module):
  """Routed experts plus the shared one. Dropless; padding reaches no routed expert."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.run = config, run
    self.gate = Router(config, rngs=rngs)
    self.experts = Experts(config, rngs=rngs)
    if config.shared_experts:
      self.shared = SwiGLU(config, run, rngs=rngs)

  def __call__(
    self, x_BxSxD: Float[Array, "B S D"], batch: Batch
  ) -> tuple[Float[Array, "B S D"], Float[Array, "*kinds E"], Float[Array, ""], dict]:
    """(result, load per expert, balance loss, trace).

    The load of a model with vision is [2, E]: of text tokens and of image tokens.
    """
    c = self.config
    B, S, D = x_BxSxD.shape
    x_NxD = x_BxSxD.reshape(B * S, D)
    is_image_Nx1 = batch.is_image_BxS.reshape(B * S, 1)
    bias = self.gate.bias[...]
    if c.vision_layers:
      bias = jnp.where(is_image_Nx1, self.gate.bias_image[...], bias)
    count_BxS = jnp.where(batch.is_prompt_BxS, c.prompt_experts, c.experts_per_token)
    active_N = jnp.where(batch.valid_BxS, count_BxS, 0).reshape(B * S)
    routing = moe.route(
      x_NxD.astype(jnp.float32),
      self.gate.weight[...],
      bias,
      top_k=c.experts_per_token,
      score_func=c.score_func,
      gate_temp=c.gate_temp,
      norm_topk_prob=c.norm_topk_prob,
      route_scale=c.route_scale,
      active_N=active_N,
    )
    experts = (self.experts.w1, self.experts.w3, self.experts.w2)
    y_NxD = moe.moe(
      x_NxD,
      routing.ids_NxA,
      routing.weights_NxA,
      *(weights.expert_matrices(w, x_NxD.dtype) for w in experts),
      limit=c.swiglu_limit,
      released_rounding=self.run.official,
      backend=self.run.backend,
    )
    if c.shared_experts:
      y_NxD = y_NxD + self.shared(x_NxD).astype(jnp.float32)
    y_NxD = y_NxD.astype(x_NxD.dtype)
    balance = moe.sequence_balance_loss(
      routing.scores_NxE.reshape(B, S, -1), routing.ids_NxA.reshape(B, S, -1), batch.valid_BxS
    )
    if c.vision_layers:
      kinds = (jnp.where(is_image_Nx1 == image, routing.ids_NxA, -1) for image in (False, True))
      load_E = jnp.stack([moe.expert_load(ids_NxA, c.n_experts) for ids_NxA in kinds])
    else:
      load_E = moe.expert_load(routing.ids_NxA, c.n_experts)
    trace = {
      "experts": routing.ids_NxA.reshape(B, S, -1),
      "expert_weights": routing.weights_NxA.reshape(B, S, -1),
    }
    return y_NxD.reshape(B, S, D), load_E, balance, trace
