"""Constants of the published model that follow from its config: rotations and Engram's hash."""

import numpy as np


def rope_tables(t: dict, positions: np.ndarray, is_global: bool) -> tuple[np.ndarray, np.ndarray]:
  """cos and sin [S, R / 2] that were float32."""
  r, one = t["qk_rope_head_dim"], np.float32(1)
  theta = t["compress_rope_theta"] if is_global else t["rope_theta"]
  exponents = np.arange(0, r, 2).astype(np.float32) / np.float32(r)
  frequencies = one / (float(theta) ** exponents.astype(np.float64)).astype(np.float32)
  if is_global and t["rope_scaling"]:
    yarn = t["rope_scaling"]

    def correction(turns):
      length = yarn["original_max_position_embeddings"]
      return r * np.log(length / (2 * np.pi * turns)) / (2 * np.log(theta))

    low = max(np.floor(correction(yarn["beta_fast"])), 0)
    high = min(np.ceil(correction(yarn["beta_slow"])), r - 1)
    # Equal ends are a step, as in the published code.
    ramp = np.clip((np.arange(r // 2) - low) / (high - low or 0.001), 0, 1).astype(np.float32)
    slow = frequencies / np.float32(yarn["factor"])
    frequencies = slow * ramp + frequencies * (one - ramp)
  angles = np.asarray(positions, np.float32)[:, None] * frequencies
  tables = (f(angles.astype(np.float64)).astype(np.float32) for f in (np.cos, np.sin))
  return tuple(table.astype(np.float64) for table in tables)


def engram_pad(t: dict) -> int:
  return t["engram_pad_token_id"] if "engram_pad_token_id" in t else t["engram_pad_id"]


def hash_constants(t: dict) -> tuple[list, list, list]:
  """(primes [orders, heads], offsets [columns], multipliers [N]) of each Engram layer, in order."""
  used, primes, offsets, multipliers = set(), [], [], []
  for layer in t["engram_layer_ids"]:
    orders = t["engram_max_ngram_size"] - 1
    mine = np.zeros((orders, t["engram_n_heads"]), np.int64)
    for n in range(orders):
      candidate = t["engram_vocab_size"] - 1
      for head in range(t["engram_n_heads"]):
        candidate += 1
        while candidate in used or not _is_prime(candidate):
          candidate += 1
        used.add(candidate)
        mine[n, head] = candidate
    primes.append(mine)
    offsets.append(np.concatenate([[0], np.cumsum(mine.ravel())[:-1]]))
    bound = max(1, (2**63 - 1) // t["engram_compressed_vocab_size"] // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, t["engram_max_ngram_size"])
    multipliers.append(draws * 2 + 1)
  return primes, offsets, multipliers


def _is_prime(n: int) -> bool:
  return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
