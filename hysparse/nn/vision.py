"""The image path: patches through a vision transformer, and its states to rows like embeddings.

An image is a grid of n_h x n_w patches in reading order; the grid is static, so each grid compiles
once. Where its rows stand in a sequence is the matter of image_span.py.

Source: vision part of the released code of DeepSeek-V4.1-Flash (arXiv 2609.19969).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hysparse_kernels.compat import einsum
from hysparse_kernels.dense_attention import dense_attention
from hysparse_kernels.moe import swiglu
from jaxtyping import Array, Float

from hysparse.config import ModelConfig
from hysparse.nn import init
from hysparse.nn.execution import Execution
from hysparse.nn.image_span import Grid, merged_grid
from hysparse.nn.linear import Linear, RMSNorm

NORM_EPS = 1e-6  # of the vision transformer; the text model has its own


class BiasedLinear(nnx.Module):
  """x @ weight + bias, summed in float32 and rounded once to the dtype of x."""

  def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, gain: float = 1.0):
    self.weight = nnx.Param(init.matrix(rngs.params(), (inputs, outputs), gain))
    self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

  def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    y = einsum("...i,io->...o", x, self.weight[...].astype(x.dtype))
    return (y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
  """Every patch attends to every patch; heads of their own keys, no sink."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    width, gain = config.vision_dim, init.residual_gain(config.vision_layers)
    self.heads, self.run = config.vision_heads, run
    self.wqkv = BiasedLinear(width, 3 * width, rngs=rngs)
    self.wo = BiasedLinear(width, width, rngs=rngs, gain=gain)

  def __call__(
    self, x_NxV: Float[Array, "N V"], angles_NxA: Float[Array, "N A"]
  ) -> Float[Array, "N V"]:
    N, V = x_NxV.shape
    qkv_Nx3xHxC = self.wqkv(x_NxV).reshape(N, 3, self.heads, V // self.heads)
    q, k = (rotate(qkv_Nx3xHxC[:, i], angles_NxA) for i in (0, 1))
    everything = jnp.zeros((1, N), jnp.int32), jnp.full((1, N), N, jnp.int32)
    attended = dense_attention(
      q[None],
      k[None],
      qkv_Nx3xHxC[None, :, 2],
      *everything,
      scale=q.shape[-1] ** -0.5,
      backend=self.run.backend,
    )
    return self.wo(attended.out_BxSxHxC.reshape(N, V))


class SwiGLU(nnx.Module):
  """w2(silu(gate) * up); w1 holds the gate's columns first. No clamp and no bias."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    width, inner = config.vision_dim, config.vision_ffn_dim
    self.w1 = Linear(width, 2 * inner, rngs=rngs)
    self.w2 = Linear(inner, width, rngs=rngs, gain=init.residual_gain(config.vision_layers))

  def __call__(self, x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    gate, up = jnp.split(self.w1(x), 2, axis=-1)
    return self.w2(swiglu(gate, up, limit=0).astype(x.dtype))


class Block(nnx.Module):
  """Attention and SwiGLU, each behind its norm and added to the stream."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.norm1 = RMSNorm(config.vision_dim, NORM_EPS)
    self.attn = Attention(config, run, rngs=rngs)
    self.norm2 = RMSNorm(config.vision_dim, NORM_EPS)
    self.mlp = SwiGLU(config, rngs=rngs)

  def __call__(
    self, x_NxV: Float[Array, "N V"], angles_NxA: Float[Array, "N A"]
  ) -> Float[Array, "N V"]:
    x_NxV = x_NxV + self.attn(self.norm1(x_NxV), angles_NxA)
    return x_NxV + self.mlp(self.norm2(x_NxV))


class VisionTower(nnx.Module):
  """Patches to states behind the last norm, in the compute dtype; blocks stacked on axis 0."""

  def __init__(self, config: ModelConfig, run: Execution, *, rngs: nnx.Rngs):
    self.config, self.run = config, run
    self.patch = BiasedLinear(3 * config.vision_patch**2, config.vision_dim, rngs=rngs)
    keys = jax.random.split(rngs.params(), config.vision_layers)
    self.blocks = nnx.vmap(lambda key: Block(config, run, rngs=nnx.Rngs(params=key)))(keys)
    self.norm = RMSNorm(config.vision_dim, NORM_EPS)

  def __call__(self, patches_Nx3xPxP: Float[Array, "N 3 P P"], grid: Grid) -> Float[Array, "N V"]:
    """Raises ValueError for patches that do not fill the grid."""
    n_h, n_w = grid
    expected = (n_h * n_w, 3, self.config.vision_patch, self.config.vision_patch)
    if patches_Nx3xPxP.shape != expected:
      raise ValueError(f"patches: shape is {patches_Nx3xPxP.shape}; grid {grid} needs {expected}")
    angles_NxA = angles(self.config, grid)
    graphdef, states = nnx.split(self.blocks)

    def step(x_NxV, state):
      return nnx.merge(graphdef, state)(x_NxV, angles_NxA), None

    x_NxV = self.patch(patches_Nx3xPxP.reshape(n_h * n_w, -1).astype(self.run.dtype))
    return self.norm(jax.lax.scan(step, x_NxV, states)[0])


class Aligner(nnx.Module):
  """Squares of states to rows as wide as an embedding: linear, exact GELU, linear."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    D, self.merge = config.d_model, config.vision_merge
    self.w1 = BiasedLinear(config.vision_dim * self.merge**2, D, rngs=rngs)
    self.w2 = BiasedLinear(D, D, rngs=rngs)

  def __call__(self, x_NxV: Float[Array, "N V"], grid: Grid) -> Float[Array, "n D"]:
    """One row for each square of merge x merge patches, in reading order."""
    x_nxD = self.w1(unshuffle(x_NxV, grid, self.merge))
    x_nxD = jax.nn.gelu(x_nxD.astype(jnp.float32), approximate=False).astype(x_nxD.dtype)
    return self.w2(x_nxD)


def angles(config: ModelConfig, grid: Grid) -> Float[Array, "N A"]:
  """Rotation of each channel pair of a head at each patch, float32.

  A is half a head's width: the first A/2 pairs turn with the row, the others with the column, both
  with the frequencies theta^(-2i/A).
  """
  n_h, n_w = grid
  A = config.vision_dim // config.vision_heads // 2
  power = np.power(np.float64(config.vision_theta), np.arange(0, A, 2, dtype=np.float64) / A)
  freqs = np.float32(1.0) / power.astype(np.float32)
  rows_HxF = jnp.arange(n_h, dtype=jnp.float32)[:, None] * freqs
  columns_WxF = jnp.arange(n_w, dtype=jnp.float32)[:, None] * freqs
  parts = (jnp.repeat(rows_HxF, n_w, axis=0), jnp.tile(columns_WxF, (n_h, 1)))
  return jnp.concatenate(parts, axis=-1)


def rotate(x_NxHxC: Float[Array, "N H C"], angles_NxA: Float[Array, "N A"]) -> jax.Array:
  """Rotates channel i against channel C/2 + i (not adjacent ones), in float32; dtype of x."""
  first, second = jnp.split(x_NxHxC.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angles_NxA)[:, None], jnp.sin(angles_NxA)[:, None]
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_NxHxC.dtype)


def unshuffle(x_NxV: Float[Array, "N V"], grid: Grid, merge: int) -> Float[Array, "n VM2"]:
  """Squares of merge x merge patches as rows, after zeros at the bottom and right of the grid.

  Channels are the slowest: channel c of the patch at (y, x) stands at (c * merge + y) * merge + x.
  """
  (n_h, n_w), (rows, columns) = grid, merged_grid(grid, merge)
  x_HxWxV = x_NxV.reshape(n_h, n_w, -1)
  x_HxWxV = jnp.pad(x_HxWxV, ((0, rows * merge - n_h), (0, columns * merge - n_w), (0, 0)))
  squares = x_HxWxV.reshape(rows, merge, columns, merge, -1).transpose(0, 2, 4, 1, 3)
  return squares.reshape(rows * columns, -1)


def encode_image(
  graphdef: nnx.GraphDef,
  state: nnx.State,
  patches_Nx3xPxP: Float[Array, "N 3 P P"],
  grid: Grid,
) -> Float[Array, "n D"]:
  """Rows for the IMAGE tokens of one image, to be compiled over (static graphdef, static grid).

  Args:
    graphdef, state: a model with vision.
    patches_Nx3xPxP: normalised pixels of n_h * n_w patches in reading order; channel, row, column.
    grid: (n_h, n_w).

  Raises:
    ValueError: patches that do not fill the grid.
  """
  return nnx.merge(graphdef, state).encode_image(patches_Nx3xPxP, grid)
