"""Next tokens from logits: temperature, min-p and top-p per sequence, draws that can be repeated.

The settings of a batch are arrays, so one compiled program serves any mix of sequences. A draw
depends on its distribution, its sequence's seed and the position of the token drawn, on nothing
else: not the neighbours in the batch, not the slot, not how the run was cut into calls.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

# Independent uses of one (seed, position). A token that the model's own distribution (or its
# residual) gives takes TOKEN, whether it was decoded plainly or ends a verified draft.
TOKEN, DRAFT, ACCEPT = range(3)

NO_TOKEN = -1  # of a row that has no distribution

_LEAST_TEMPERATURE = np.finfo(np.float32).tiny  # division by less is not exact everywhere
_INFINITY_BITS = 0x7F800000  # of float32; the bits of non-negative floats order as the floats do


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the tokens of one sequence are chosen.

  Attributes:
    temperature: divides the logits; 0 (or below 1.2e-38) takes the likeliest token.
    top_p: of the tokens that min_p leaves, the likeliest ones that together hold this share stay.
    min_p: tokens less likely than this share of the likeliest one's probability are dropped.
    seed: equal seeds give equal tokens at equal positions of equal distributions.

  Raises:
    ValueError: a value outside its range.
  """

  temperature: float = 0.0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    most = float(np.finfo(np.float32).max)
    _check("temperature", self.temperature, "a finite number, at least 0", lambda x: 0 <= x <= most)
    _check("top_p", self.top_p, "a number above 0, at most 1", lambda x: 0 < x <= 1)
    _check("min_p", self.min_p, "a number from 0 to 1", lambda x: 0 <= x <= 1)
    _check(
      "seed",
      self.seed,
      "an integer from 0 to 4294967295",
      lambda x: 0 <= x < 2**32,
      numbers.Integral,
    )


def _check(field: str, value, legal: str, holds, kind=numbers.Real) -> None:
  if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
    raise ValueError(f"sampling.{field}: {value!r}; must be {legal}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
  """The settings of B sequences; fields as in `Sampling`, ranges are not checked again."""

  temperature_B: Float[Array, "B"]
  top_p_B: Float[Array, "B"]
  min_p_B: Float[Array, "B"]
  seed_B: UInt[Array, "B"]

  @classmethod
  def of(cls, rows: Sequence[Sampling]) -> SamplingBatch:
    floats = (
      jnp.asarray([getattr(row, name) for row in rows], jnp.float32)
      for name in ("temperature", "top_p", "min_p")
    )
    return cls(*floats, jnp.asarray(np.asarray([row.seed for row in rows], np.uint32)))


def keys(
  seed_B: UInt[Array, "*shape"], position_B: Int[Array, "*shape"], stream: int = TOKEN
) -> Key[Array, "*shape"]:
  """One random key per (seed, position); the two shapes broadcast.

  Args:
    position_B: absolute position, in its sequence, of the token to be drawn (not of the one read).
    stream: TOKEN, DRAFT or ACCEPT; the streams of one position are independent.
  """

  def one(seed, position):
    # The generator is named: another default could give a row other bits in another batch.
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, position), stream)

  seed_B, position_B = jnp.broadcast_arrays(jnp.asarray(seed_B, jnp.uint32), position_B)
  return jax.vmap(one)(seed_B.ravel(), position_B.ravel()).reshape(seed_B.shape)


def distribution(
  logits_BxV: Float[Array, "B *N V"], sampling: SamplingBatch
) -> Float[Array, "B *N V"]:
  """Log-probabilities from which tokens are drawn: temperature, then min-p, then top-p.

  Top-p counts shares of what min-p left, and the token that reaches its share stays, so at least
  one does. Temperature 0 gives the likeliest token all mass. Of equal logits the lower id comes
  first, for both. Where no sequence asks for top-p, its search (31 passes) is not run.

  A row with a NaN or +inf logit, or with nothing but -inf, has no distribution: it comes back as
  all NaN, whatever its settings, and `sample` gives NO_TOKEN for it.

  Args:
    logits_BxV: float32; a token with -inf is never chosen. Axes between B and V share the
      settings of their sequence.

  Returns:
    float32, normalised; -inf for what was dropped.
  """
  shape = logits_BxV.shape
  logits_RxV = logits_BxV.astype(jnp.float32).reshape(-1, shape[-1])
  temperature_Rx1, top_p_Rx1, min_p_Rx1 = (
    jnp.repeat(x_B, int(np.prod(shape[1:-1])))[:, None]
    for x_B in (sampling.temperature_B, sampling.top_p_B, sampling.min_p_B)
  )
  greedy_Rx1 = ~(temperature_Rx1 >= _LEAST_TEMPERATURE)
  largest_Rx1 = logits_RxV.max(-1, keepdims=True)
  # How far a token is behind the likeliest one: 0 .. inf, in units of the temperature.
  gap_RxV = (largest_Rx1 - logits_RxV) / jnp.where(greedy_Rx1, 1, temperature_Rx1)
  kept_RxV = gap_RxV <= -jnp.log(min_p_Rx1)
  searched_Rx1 = (top_p_Rx1 < 1) & ~greedy_Rx1
  kept_RxV = jax.lax.cond(
    searched_Rx1.any(),
    lambda: kept_RxV & (~searched_Rx1 | _likeliest(gap_RxV, kept_RxV, top_p_Rx1)),
    lambda: kept_RxV,
  )
  log_RxV = jax.nn.log_softmax(jnp.where(kept_RxV, -gap_RxV, -jnp.inf))
  ids_V = jnp.arange(shape[-1])
  first_Rx1 = jnp.where(logits_RxV == largest_Rx1, ids_V, shape[-1]).min(-1, keepdims=True)
  log_RxV = jnp.where(greedy_Rx1, jnp.where(ids_V == first_Rx1, 0, -jnp.inf), log_RxV)
  return jnp.where(jnp.isfinite(largest_Rx1), log_RxV, jnp.nan).reshape(shape)


def _likeliest(
  gap_RxV: Float[Array, "R V"], kept_RxV: Bool[Array, "R V"], top_p_Rx1: Float[Array, "R 1"]
) -> Bool[Array, "R V"]:
  """The fewest tokens of smallest gap that hold a share top_p of the kept mass.

  Halves the range of the largest gap that stays, bit by bit: a sort of the vocabulary takes more
  than 10 times as long on a CPU (measured with 4,096 and 129,280 tokens).
  """
  weight_RxV = jnp.where(kept_RxV, jnp.exp(-gap_RxV), 0)
  share_Rx1 = top_p_Rx1 * weight_RxV.sum(-1, keepdims=True)
  bits_RxV = jax.lax.bitcast_convert_type(gap_RxV, jnp.int32)

  def halve(_, bounds):
    low_Rx1, high_Rx1 = bounds
    middle_Rx1 = low_Rx1 + (high_Rx1 - low_Rx1) // 2
    mass_Rx1 = jnp.where(bits_RxV <= middle_Rx1, weight_RxV, 0).sum(-1, keepdims=True)
    enough_Rx1 = mass_Rx1 >= share_Rx1
    return (
      jnp.where(enough_Rx1, low_Rx1, middle_Rx1 + 1),
      jnp.where(enough_Rx1, middle_Rx1, high_Rx1),
    )

  low_Rx1 = jnp.zeros(top_p_Rx1.shape, jnp.int32)
  cut_Rx1, _ = jax.lax.fori_loop(0, 31, halve, (low_Rx1, low_Rx1 + _INFINITY_BITS))
  nearer_RxV, level_RxV = bits_RxV < cut_Rx1, bits_RxV == cut_Rx1
  nearer_mass_Rx1 = jnp.where(nearer_RxV, weight_RxV, 0).sum(-1, keepdims=True)
  before_RxV = jnp.cumsum(level_RxV, axis=-1) - level_RxV  # equal ones with a lower id
  missing_RxV = nearer_mass_Rx1 + before_RxV * weight_RxV < share_Rx1
  return nearer_RxV | (level_RxV & (missing_RxV | (before_RxV == 0)))


def sample(keys_B: Key[Array, "B"], log_probs_BxV: Float[Array, "B V"]) -> Int[Array, "B"]:
  """A token per row, int32; NO_TOKEN (-1) for a row that holds a NaN or no mass."""
  return draw(keys_B, jnp.exp(log_probs_BxV))


def draw(keys_B: Key[Array, "B"], weights_BxV: Float[Array, "B V"]) -> Int[Array, "B"]:
  """An index per row, in proportion to its weights; NO_TOKEN where they are no distribution.

  Walks down a binary tree of sums, one random number per level: it reads the weights once and needs
  no random number per token, and an index of weight 0 is never taken. The tree adds pairs in a
  fixed order, so the sums of a row are the same bits in every batch.

  Args:
    weights_BxV: float32, not negative, in any scale whose sum is finite.
  """
  B, V = weights_BxV.shape
  levels = (V - 1).bit_length()
  tree = [jnp.pad(weights_BxV, ((0, 0), (0, 2**levels - V)))]
  for _ in range(levels):
    left, right = jnp.split(tree[-1], 2, axis=1)
    tree.append(left + right)
  total_B = tree.pop()[:, 0]
  u_BxL = jax.vmap(lambda key: uniform(key, (levels,)))(keys_B)
  rows_B, ids_B = jnp.arange(B), jnp.zeros(B, jnp.int32)
  for level, u_B in zip(reversed(tree), u_BxL.T, strict=True):
    half = level.shape[1] // 2
    left_B, right_B = level[rows_B, ids_B], level[rows_B, ids_B + half]
    # The rarer side is the one that a small u takes: u is finest near 0.
    rarer_B = u_B * (left_B + right_B) < jnp.minimum(left_B, right_B)
    ids_B = jnp.where(rarer_B == (left_B <= right_B), ids_B, ids_B + half)
  return jnp.where((total_B > 0) & jnp.isfinite(total_B), ids_B, NO_TOKEN)


def uniform(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "*shape"]:
  """Random numbers in [0, 1), in steps of 2^-46 near 0.

  The generator's own float32 have steps of 2^-23 everywhere: an event of probability 1e-12, taken
  where u < 1e-12, would happen once in 8 million draws.
  """
  coarse, fine = jax.random.uniform(key, (2, *shape))
  return jnp.minimum(coarse + fine * 2.0**-23, 1 - 2.0**-24)
