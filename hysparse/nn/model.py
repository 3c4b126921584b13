"""The language model: embedding, runs of layers, final norm and head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels import hyper_connections as hc
from jaxtyping import Array, Float, Int

from hysparse.config import Config, ConfigError, ModelConfig
from hysparse.nn import init, streams
from hysparse.nn.batch import Batch
from hysparse.nn.block import Block, Carry, Inputs
from hysparse.nn.engram import TokenMap
from hysparse.nn.execution import Execution
from hysparse.nn.handoff import LayerAux, Published
from hysparse.nn.linear import RMSNorm


class Table(nnx.Module):
  """Rows [vocabulary, width] of the embedding or the head."""

  def __init__(self, config: ModelConfig, std: float, *, rngs: nnx.Rngs):
    shape = (config.vocab_size, config.d_model)
    self.weight = nnx.Param(init.table(rngs.params(), shape, std))


class Model(nnx.Module):
  """Runs of equal layers keep their parameters stacked on axis 0; they are scanned or unrolled."""

  def __init__(
    self,
    config: ModelConfig,
    run: Execution,
    *,
    rngs: nnx.Rngs,
    token_map: Int[np.ndarray, " V"] | None = None,
  ):
    self.config, self.run = config, run
    self.embed = Table(config, init.EMBEDDING_STD, rngs=rngs)
    if config.engram_layers:
      same = np.arange(config.vocab_size)
      self.token_map = TokenMap(jnp.asarray(same if token_map is None else token_map, jnp.int32))

    def stack(first: int, count: int) -> Block:
      keys = jax.random.split(rngs.params(), count)
      return nnx.vmap(lambda key: Block(config, first, run, rngs=nnx.Rngs(params=key)))(keys)

    self.runs = nnx.List([stack(*run_of_layers) for run_of_layers in config.layers.runs()])
    self.norm = RMSNorm(config.d_model, config.norm_eps)
    self.head = Table(config, init.HEAD_STD * config.d_model**-0.5, rngs=rngs)

  def hidden(
    self, batch: Batch, *, capture: bool = False
  ) -> tuple[Float[Array, "B S D"], LayerAux]:
    """States behind the final norm, in the compute dtype, and what the layers told.

    Args:
      capture: unroll the layers and return their traces as a list.

    Returns:
      The `LayerAux` of all layers stacked on axis 0.
    """
    inputs = self._inputs(batch)
    embedded = self.embed.weight[...].astype(self.run.dtype)[batch.tokens_BxS]
    carry = Carry(*streams.begin(embedded, self.config.streams))
    published, told, traces = Published(), [], []
    for stack, (_, count) in zip(self.runs, self.config.layers.runs(), strict=True):
      graphdef, states = nnx.split(stack)

      def layer(carry, published, state, graphdef=graphdef):
        return nnx.merge(graphdef, state)(carry, inputs, published, capture=capture)

      if self.run.remat == "layer":
        layer = jax.checkpoint(layer)
      if count > 1 and self.run.scan_layers and not capture:
        # Only layers that publish nothing are stacked, so the scan closes over what they read.
        def step(carry, state, layer=layer, published=published):
          carry, _, aux = layer(carry, published, state)
          return carry, aux

        carry, aux = jax.lax.scan(step, carry, states)
        told.append(aux)
      else:
        for i in range(count):
          state = jax.tree.map(lambda x, i=i: x[i], states)
          carry, published, aux = layer(carry, published, state)
          traces.append(aux.trace)
          aux = dataclasses.replace(aux, trace=None)
          told.append(jax.tree.map(lambda x: x[None], aux))
    aux = jax.tree.map(lambda *xs: jnp.concatenate(xs), *told)
    if capture:
      aux = dataclasses.replace(aux, trace=traces)
    return self.norm(self._fold(carry)), aux

  def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Float32 logits of final states."""
    weight_VxD = self.head.weight[...].astype(x.dtype)
    return jnp.einsum("...d,vd->...v", x, weight_VxD).astype(jnp.float32)

  def _inputs(self, batch: Batch) -> Inputs:
    if not self.config.engram_layers:
      return Inputs(batch, None, None)
    token_map = self.token_map[...]
    return Inputs(batch, token_map[batch.tokens_BxS], token_map[self.config.engram_pad_id])

  def _fold(self, carry: Carry) -> Float[Array, "B S D"]:
    B, S, M, D = carry.x_BxSxMxD.shape
    if self.config.residual == "plain":
      return carry.x_BxSxMxD[:, :, 0]
    u_NxD = hc.fold(
      carry.x_BxSxMxD.reshape(B * S, M, D),
      carry.pre_BxSxM.reshape(B * S, M),
      backend=self.run.backend,
    )
    return u_NxD.reshape(B, S, D)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
  """Logits [B, N, V] in float32 for the positions asked, and what the layers told."""

  logits_BxNxV: Float[Array, "B N V"]
  aux: LayerAux


def create(
  config: Config, seed: int = 0, token_map: Int[np.ndarray, " V"] | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
  """A freshly initialised model, split once into its static graph and its arrays.

  Args:
    seed: of the parameters; the same seed gives the same parameters whatever is scanned.
    token_map: token id -> compressed id for Engram; None maps each token to itself.

  Raises:
    ConfigError: a token map that does not fit the vocabulary.
  """
  model = config.model
  if token_map is not None and model.engram_layers:
    compressed = model.engram_compressed_vocab or model.vocab_size
    if len(token_map) != model.vocab_size or not 0 <= min(token_map) <= max(token_map) < compressed:
      raise ConfigError(
        f"engram token map: maps {len(token_map)} ids to 0..{max(token_map)}; must map"
        f" model.vocab_size ({model.vocab_size}) ids below engram_compressed_vocab ({compressed})"
      )

  def build(key):
    rngs = nnx.Rngs(params=key)
    return nnx.split(Model(model, Execution.of(config.train), rngs=rngs, token_map=token_map))

  # The hardware generator compiles several times faster than the default one: every parameter
  # shape is a program of its own.
  key = jax.random.key(seed, impl="unsafe_rbg")
  graphdef = abstract(config)[0]
  return graphdef, jax.jit(lambda key: build(key)[1])(key)


def abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """The same with shapes and dtypes in place of arrays: the released model takes a second."""
  return nnx.split(
    nnx.eval_shape(lambda: Model(config.model, Execution.of(config.train), rngs=nnx.Rngs(params=0)))
  )


def forward(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batch: Batch,
  logits_at: Int[Array, "B N"] | None = None,
  *,
  all_positions: bool = False,
) -> Output:
  """The model as a pure function, to be compiled over (static graphdef, state, batch).

  Args:
    logits_at: row offsets whose logits are wanted; None: the last one.
    all_positions: all of them (S x V floats: for tests and small models).
  """
  model = nnx.merge(graphdef, state)
  x_BxSxD, aux = model.hidden(batch)
  if not all_positions:
    if logits_at is None:
      logits_at = jnp.full((x_BxSxD.shape[0], 1), x_BxSxD.shape[1] - 1, jnp.int32)
    x_BxSxD = jnp.take_along_axis(x_BxSxD, logits_at[..., None], axis=1)
  return Output(model.logits(x_BxSxD), aux)
