"""Rotary positions: adjacent channel pairs, float32 tables, YaRN frequency interpolation."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hysparse.config import ModelConfig


@functools.cache
def frequencies(config: ModelConfig, has_global_branch: bool) -> np.ndarray:
  """Rotation per position of each channel pair, float32 [R/2].

  Layers with a global branch use their own base and, if configured, YaRN, at any length; no
  magnitude or attention factor goes with it.

  Source: arXiv 2609.19969, section 2.2; YaRN, arXiv 2309.00071.
  """
  R = config.rope_dim
  theta = config.compress_rope_theta if has_global_branch else config.rope_theta
  # The published tables round theta^(2i/R) correctly to float32 before they divide; one unit in
  # the last place less flips quantised codes later on.
  power = np.power(np.float64(theta), np.arange(0, R, 2, dtype=np.float64) / R)
  freqs = np.float32(1.0) / power.astype(np.float32)
  if not (has_global_branch and config.yarn_factor):
    return freqs

  def pair_of(rotations: float) -> float:
    return R * math.log(config.yarn_original / (2 * math.pi * rotations)) / (2 * math.log(theta))

  low = max(math.floor(pair_of(config.yarn_beta_fast)), 0)
  high = min(math.ceil(pair_of(config.yarn_beta_slow)), R - 1)
  ramp = (np.arange(R // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001))
  ramp = np.clip(ramp, 0, 1)
  return (freqs / np.float32(config.yarn_factor) * ramp + freqs * (1 - ramp)).astype(np.float32)


def rotate(
  x: Float[Array, "B S ... C"],
  positions_BxS: Int[Array, "B S"],
  freqs: np.ndarray,
  *,
  inverse: bool = False,
) -> Float[Array, "B S ... C"]:
  """Rotates the last 2 * len(freqs) channels of x by position times frequency, in float32."""
  angles = positions_BxS.astype(jnp.float32)[..., None] * freqs
  angles = angles.reshape(*angles.shape[:2], *[1] * (x.ndim - 3), len(freqs))
  cos, sin = jnp.cos(angles), jnp.sin(angles) * (-1 if inverse else 1)
  R = 2 * len(freqs)
  pairs = x[..., -R:].astype(jnp.float32).reshape(*x.shape[:-1], R // 2, 2)
  even, odd = pairs[..., 0], pairs[..., 1]
  turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
  turned = turned.reshape(*x.shape[:-1], R).astype(x.dtype)
  return jnp.concatenate([x[..., :-R], turned], axis=-1)
