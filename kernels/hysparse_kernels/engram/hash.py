"""The n-gram hash on the device, in exact 32-bit limbs: one implementation for every caller.

The published hash is 64-bit integer arithmetic, which devices lack (and JAX leaves off). Numbers
below 2^63 are therefore two uint32 words: products come from 16-bit limbs, the exclusive-or goes
word by word, and the remainder byte by byte (Horner), which 32 bits hold for primes below 2^24.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from hysparse_kernels import arguments
from hysparse_kernels.engram.tables import HashConstants


def hash_rows(
  ids_BxS: Int[Array, "B S"],
  positions_BxS: Int[Array, "B S"],
  constants: HashConstants,
  pad_id: int | Int[Array, ""],
  *,
  dead_BxS: Bool[Array, "B S"] | None = None,
  history_BxL: Int[Array, "B L"] | None = None,
) -> Int[Array, "B S columns"]:
  """Rows of the table that each token looks up, int32, order major (2-grams first), head minor.

  The look-back of a token stops at its document's start and at any dead token: that place and all
  older ones count as `pad_id`, and a dead token's own n-grams are all padding.

  Args:
    ids_BxS: compressed token ids below the vocabulary that the multipliers were made for; a
      negative id is a dead token and never indexes anything.
    positions_BxS: position in the document, 0 at its start.
    pad_id: compressed id of the padding token.
    dead_BxS: further dead tokens (images and their delimiters).
    history_BxL: the N-1 compressed ids before this call, oldest first, with dead ones negative.
      Without it nothing came before: right for whole prompts and training, wrong for a chunk.

  Raises:
    ValueError: a negative pad id, or a history of another length than N-1.

  Source: arXiv 2609.19969 and the released code.
  """
  lookback = len(constants.multipliers) - 1
  batch, length = ids_BxS.shape
  if not isinstance(pad_id, jax.Array):
    arguments.whole("pad_id", pad_id, 0)
  given = {} if history_BxL is None else {"history_BxL": history_BxL}
  arguments.integers(ids_BxS=ids_BxS, positions_BxS=positions_BxS, **given)
  ids_BxS, positions_BxS = ids_BxS.astype(jnp.int32), positions_BxS.astype(jnp.int32)
  if history_BxL is None:
    history_BxL = jnp.full((batch, lookback), -1, ids_BxS.dtype)
  if history_BxL.shape != (batch, lookback):
    raise ValueError(
      f"history_BxL: has shape {history_BxL.shape}; must be {(batch, lookback)}, the ids before"
      " this call"
    )
  if dead_BxS is not None:
    ids_BxS = jnp.where(dead_BxS, -1, ids_BxS)
  recent_BxP = jnp.concatenate([history_BxL, ids_BxS], axis=1)

  alive_BxS = jnp.ones(ids_BxS.shape, bool)
  high_BxS = low_BxS = jnp.zeros(ids_BxS.shape, jnp.uint32)
  highs, lows = [], []  # the hash after each order
  for back, multiplier in enumerate(constants.multipliers):
    past_BxS = recent_BxP[:, lookback - back : lookback - back + length]
    alive_BxS &= (past_BxS >= 0) & (positions_BxS >= back)
    id_BxS = jnp.where(alive_BxS, past_BxS, pad_id).astype(jnp.uint32)
    product_high, product_low = _product(id_BxS, multiplier)
    high_BxS, low_BxS = high_BxS ^ product_high, low_BxS ^ product_low
    if back:
      highs.append(high_BxS)
      lows.append(low_BxS)
  primes = np.asarray(constants.primes, np.uint32)
  remainder_BxSxOxI = _remainder(jnp.stack(highs, -1), jnp.stack(lows, -1), primes)
  rows = remainder_BxSxOxI.astype(jnp.int32) + np.asarray(constants.offsets, np.int32)
  return rows.reshape(batch, length, constants.columns)


def _product(a: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
  """(high, low) words of uint32 `a` times a number below 2^63; exact while that is below 2^64."""
  high, low = _wide_product(a, multiplier & 0xFFFFFFFF)
  return high + a * np.uint32(multiplier >> 32), low


def _wide_product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
  """(high, low) words of uint32 times uint32, from products of 16-bit limbs."""
  a1, a0 = a >> 16, a & 0xFFFF
  b1, b0 = np.uint32(b >> 16), np.uint32(b & 0xFFFF)
  bottom, cross1, cross2 = a0 * b0, a1 * b0, a0 * b1
  middle = (bottom >> 16) + (cross1 & 0xFFFF) + (cross2 & 0xFFFF)
  low = (middle << 16) | (bottom & 0xFFFF)
  return a1 * b1 + (cross1 >> 16) + (cross2 >> 16) + (middle >> 16), low


def _remainder(high: jax.Array, low: jax.Array, primes: np.ndarray) -> jax.Array:
  """(high * 2^32 + low) mod every prime: [...] and [orders, heads] to [..., heads]."""
  remainder = high[..., None] % primes
  for shift in (24, 16, 8, 0):
    byte = (low >> shift) & 0xFF
    remainder = ((remainder << 8) | byte[..., None]) % primes
  return remainder
