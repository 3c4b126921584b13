"""Engram: n-gram memory added to the residual streams.

Source: arXiv 2609.19969, section 2.6.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels import engram
from jaxtyping import Array, Float, Int

from hysparse.config import ConfigError, ModelConfig
from hysparse.nn import init, weights
from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.linear import Linear


class TokenMap(nnx.Variable):
  """Token id -> compressed id (tokens whose text normalises alike share one). Never trained."""


@functools.cache
def tables(config: ModelConfig) -> tuple[engram.HashConstants, ...]:
  """Hash constants and table layout of each Engram layer, in layer order.

  Raises:
    ConfigError: tables larger than the hash can address.
  """
  try:
    return engram.hash_constants(
      config.engram_layers,
      config.engram_max_ngram,
      config.engram_heads,
      config.engram_vocab,
      config.engram_compressed_vocab or config.vocab_size,
    )
  except ValueError as error:
    raise ConfigError(f"model.{error}") from None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ids:
  """Compressed ids that n-grams are made of.

  Attributes:
    compressed_BxS: of the call's tokens, -1 for images.
    pad: the id that stands for missing history.
    history_BxL: ids before the call, oldest first, -1 for none; None without a cache.
  """

  compressed_BxS: Int[Array, "B S"]
  pad: Int[Array, ""]
  history_BxL: Int[Array, "B L"] | None = None


class Engram(nnx.Module):
  """Looks up the n-grams that end at each token and adds what it finds, gated, to each stream."""

  def __init__(self, config: ModelConfig, layer: int, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.layer, self.run = config, layer, run
    M, D = config.streams, config.d_model
    columns = (config.engram_max_ngram - 1) * config.engram_heads * config.engram_dim
    shape = (self.constants.rows, config.engram_dim)
    self.table = nnx.Param(init.table(rngs.params(), shape, init.ENGRAM_TABLE_STD))
    self.wkv = Linear(columns, (M + 1) * D, rngs=rngs, fp8_input=run.official)
    self.q_weight = nnx.Param(jnp.ones((M, D), jnp.float32))
    self.k_weight = nnx.Param(jnp.ones((M, D), jnp.float32))

  @property
  def constants(self) -> engram.HashConstants:
    return tables(self.config)[self.config.engram_layers.index(self.layer)]

  def __call__(
    self,
    x_BxSxMxD: Float[Array, "B S M D"],
    ids: Ids,
    batch: Batch,
  ) -> tuple[Float[Array, "B S M D"], Int[Array, "B S J"]]:
    """The streams with memory added, and the rows of the table that were looked up."""
    B, S, M, D = x_BxSxMxD.shape
    kv_NxD, rows_BxSxJ = self._look_up(x_BxSxMxD, ids, batch)
    x_NxMxD = engram.gate(
      x_BxSxMxD.reshape(B * S, M, D),
      kv_NxD[:, :M],
      kv_NxD[:, M],
      self.q_weight[...],
      self.k_weight[...],
      eps=self.config.norm_eps,
      dead_N=batch.is_image_BxS.reshape(B * S),
      backend=self.run.backend,
    )
    return x_NxMxD.reshape(B, S, M, D), rows_BxSxJ

  def openings(
    self, x_BxSxMxD: Float[Array, "B S M D"], ids: Ids, batch: Batch
  ) -> Float[Array, "B S M"]:
    """How far the gate of each stream is open; the call itself does not tell."""
    B, S, M, D = x_BxSxMxD.shape
    kv_NxD, _ = self._look_up(x_BxSxMxD, ids, batch)
    opened_NxM = engram.openings(
      x_BxSxMxD.reshape(B * S, M, D), kv_NxD[:, :M], self.q_weight[...], self.k_weight[...],
      batch.is_image_BxS.reshape(B * S), self.config.norm_eps,
    )  # fmt: skip
    return opened_NxM.reshape(B, S, M)

  def _look_up(
    self, x_BxSxMxD: Float[Array, "B S M D"], ids: Ids, batch: Batch
  ) -> tuple[Float[Array, "N M+1 D"], Int[Array, "B S J"]]:
    """A key for each stream and a value, of every token; and the rows they come from."""
    rows_BxSxJ = engram.hash_rows(
      ids.compressed_BxS,
      batch.positions_BxS,
      self.constants,
      ids.pad,
      history_BxL=ids.history_BxL,
    )
    B, S, M, D = x_BxSxMxD.shape
    memory = weights.look_up(self.table, rows_BxSxJ, x_BxSxMxD.dtype).reshape(B * S, -1)
    return self.wkv(memory).reshape(B * S, M + 1, D), rows_BxSxJ
