"""The published vision tower and aligner in NumPy, float64, one image; see numpy_model."""

import math

import numpy as np
from numpy_model import NumpyModel, rms_norm, silu, softmax

_EPS = 1e-6  # of the tower's norms; not a field of the config
_erf = np.vectorize(math.erf)


def encode(model: NumpyModel, patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
  """Patches [n, 3, p, p] in reading order, n_h by n_w of them -> aligner rows [cells, D]."""
  v, w = model.config["vision_config"], model.w

  def linear(x, name, bias=True):
    return x @ w(f"{name}.weight").T + (w(f"{name}.bias") if bias else 0)

  x = linear(patches.reshape(len(patches), -1).astype(np.float64), "vision.patch_embed.proj")
  for b in range(v["num_hidden_layers"]):
    p = f"vision.blocks.{b}"
    qkv = linear(rms_norm(x, w(f"{p}.norm1.weight"), _EPS), f"{p}.attn.wqkv")
    q, k, values = qkv.reshape(len(x), 3, v["num_attention_heads"], -1).transpose(1, 2, 0, 3)
    q, k = (rotate(z, grid, v["rope_theta"]) for z in (q, k))
    attended = softmax(q @ k.transpose(0, 2, 1) * q.shape[-1] ** -0.5) @ values
    x = x + linear(attended.transpose(1, 0, 2).reshape(x.shape), f"{p}.attn.wo")
    gate, up = np.split(
      linear(rms_norm(x, w(f"{p}.norm2.weight"), _EPS), f"{p}.mlp.w1", bias=False), 2, axis=-1
    )
    x = x + linear(silu(gate) * up, f"{p}.mlp.w2", bias=False)
  x = rms_norm(x, w("vision.norm.weight"), _EPS)

  size, (high, wide) = v["downsample_ratio"], grid
  x = x.reshape(high, wide, -1)
  x = np.pad(x, ((0, -high % size), (0, -wide % size), (0, 0)))
  cells = [
    x[top : top + size, left : left + size].transpose(2, 0, 1).ravel()  # channel, row, column
    for top in range(0, high, size)
    for left in range(0, wide, size)
  ]
  hidden = linear(np.array(cells), "aligner.w1")
  return linear(hidden * 0.5 * (1 + _erf(hidden / math.sqrt(2))), "aligner.w2")


def rotate(x: np.ndarray, grid: tuple[int, int], theta: float) -> np.ndarray:
  """[heads, n, width]: halves rotated against each other by row angles, then column angles."""
  rope_dim = x.shape[-1] // 2
  exponents = np.arange(0, rope_dim, 2).astype(np.float32) / np.float32(rope_dim)
  frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
  row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  angles = np.concatenate(
    [place[:, None].astype(np.float32) * frequencies for place in (row, column)], axis=-1
  )
  cos, sin = (f(angles.astype(np.float64)).astype(np.float32) for f in (np.cos, np.sin))
  first, second = np.split(x, 2, axis=-1)
  return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
