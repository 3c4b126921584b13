"""Parts of the model against float64 NumPy written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from hysparse.nn import rope
from hysparse.nn.compressor import Compressor
from hysparse.nn.execution import Execution
from hysparse.nn.linear import RMSNorm
from hysparse.nn.output import GroupedOutput
from hysparse.nn.streams import Streams

# A handful of float32 operations.
TOLERANCE = 3e-6
# float32 cosines of angles of thousands of radians: half an ulp of such an angle.
FAR_TOLERANCE = 3e-4


def arrays(module):
  return {
    "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
    for path, leaf in nnx.to_flat_state(nnx.state(module))
  }


def test_rms_norm():
  norm = RMSNorm(8, eps=1e-20)
  norm.weight[...] = jnp.arange(1.0, 9.0) * 40  # far from 1, like trained ones
  x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32) * 1e3
  want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True)) * np.arange(1, 9) * 40
  np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=TOLERANCE)


@pytest.mark.parametrize("yarn", [0.0, 16.0])
@pytest.mark.parametrize("position", [0, 7, 5000])
def test_rope_turns_adjacent_pairs(yarn, position):
  cfg = small.config(yarn_factor=yarn, yarn_original=64, rope_dim=8).model
  freqs = rope.frequencies(cfg, True)
  i = np.arange(4)
  want = 1 / cfg.compress_rope_theta ** (2 * i / 8)
  if yarn:
    corr = lambda n: 8 * np.log(64 / (2 * np.pi * n)) / (2 * np.log(cfg.compress_rope_theta))  # noqa: E731
    low, high = max(np.floor(corr(32)), 0), min(np.ceil(corr(1)), 7)
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    want = want / yarn * ramp + want * (1 - ramp)
  np.testing.assert_allclose(freqs, want, rtol=1e-6)

  x = np.random.default_rng(0).normal(size=(1, 1, 2, 12)).astype(np.float32)
  got = rope.rotate(jnp.asarray(x), jnp.full((1, 1), position), freqs)
  pairs = x[..., 4:].astype(np.float64)
  turned = (pairs[..., ::2] + 1j * pairs[..., 1::2]) * np.exp(1j * position * freqs)
  tolerance = FAR_TOLERANCE if position > 100 else TOLERANCE
  np.testing.assert_array_equal(got[..., :4], x[..., :4])
  np.testing.assert_allclose(got[..., 4::2], turned.real, atol=tolerance)
  np.testing.assert_allclose(got[..., 5::2], turned.imag, atol=tolerance)
  back = rope.rotate(got, jnp.full((1, 1), position), freqs, inverse=True)
  np.testing.assert_allclose(back, x, atol=TOLERANCE)


def test_rope_powers_are_rounded_once():
  """theta^(2i/R) is rounded from float64 and then divided, as the published tables are."""
  cfg = small.config(rope_dim=16, head_dim=16, index_dim=16).model
  for branch, theta in ((False, 10_000.0), (True, 160_000.0)):
    power = np.array([theta ** (i / 16) for i in range(0, 16, 2)]).astype(np.float32)
    np.testing.assert_array_equal(rope.frequencies(cfg, branch), np.float32(1) / power)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_compressor_pools_complete_groups(ratio, length):
  cfg = small.config("swa").model
  compressor = Compressor(cfg, ratio, rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(2, length, cfg.d_model)).astype(np.float32)
  got = jax.jit(lambda x: compressor(x))(jnp.asarray(x))
  w = arrays(compressor)
  want = np.zeros((2, length // ratio, cfg.head_dim))
  for b, j in np.ndindex(want.shape[:2]):
    group = x[b, j * ratio : (j + 1) * ratio].astype(np.float64)
    kv = group @ w["wkv/weight"]
    if ratio > 1:
      score = group @ w["wgate/weight"]
      weights = np.exp(score) / np.exp(score).sum(0)
      kv = kv * weights
    latent = kv.sum(0)
    want[b, j] = latent / np.sqrt((latent**2).mean())
  assert got.shape == want.shape
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_output_groups_are_block_diagonal():
  cfg = small.config("swa").model
  output = GroupedOutput(cfg, Execution(), rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(1, 2, cfg.n_heads, cfg.head_dim)).astype(np.float32)
  w = arrays(output)
  parts = [
    x[:, :, 2 * g : 2 * g + 2].reshape(1, 2, -1) @ w["wo_a/weight"][g] for g in range(cfg.o_groups)
  ]
  want = np.concatenate(parts, -1) @ w["wo_b/weight"]
  np.testing.assert_allclose(output(jnp.asarray(x)), want, atol=1e-5)


def in_numpy(streams, x, handed):
  """Two sublayers tanh, one after the other: streams and the fold handed on after each of them."""
  cfg, residual = streams[0].config, streams[0].config.residual
  M, eps = cfg.streams, cfg.hc_eps
  for s in streams:
    if residual == "plain":
      x = x + np.tanh(x)
      yield x, handed
      continue
    w = arrays(s)
    flat = x.reshape(*x.shape[:2], -1)
    mixes = flat @ w["fn"].T / np.sqrt((flat**2).mean(-1, keepdims=True))
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    scale, base = w["scale"], w["base"]
    own = sigmoid(mixes[..., :M] * scale[0] + base[:M]) + eps
    post = 2 * sigmoid(mixes[..., M : 2 * M] * scale[1] + base[M : 2 * M])
    logits = mixes[..., 2 * M :] * scale[2] + base[2 * M :]
    comb = np.exp(logits.reshape(*x.shape[:2], M, M))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    comb /= comb.sum(-2, keepdims=True) + eps
    for _ in range(cfg.sinkhorn_iters - 1):
      comb /= comb.sum(-1, keepdims=True) + eps
      comb /= comb.sum(-2, keepdims=True) + eps
    fold = own if residual == "two_pass" else handed
    y = np.tanh(np.einsum("bsm,bsmd->bsd", fold, x))
    x = post[..., None] * y[:, :, None] + np.einsum("bsij,bsid->bsjd", comb, x)
    handed = own
    yield x, handed


@pytest.mark.parametrize("residual", ["single_pass", "two_pass", "plain"])
def test_streams_fold_with_the_previous_sublayers_mix(residual):
  """Two steps of the residual streams in NumPy; two_pass alone folds with its own mix."""
  cfg = small.config("swa", residual=residual)
  streams = [Streams(cfg.model, Execution(), rngs=nnx.Rngs(seed)) for seed in (0, 1)]
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, cfg.model.streams, cfg.model.d_model))
  handed = rng.uniform(size=(2, 3, cfg.model.streams))
  (first, first_pre), (second, second_pre) = in_numpy(streams, x, handed)

  start = jnp.asarray(x, jnp.float32)
  u, mix = streams[0].enter(start, jnp.asarray(handed, jnp.float32))
  alone = streams[0].leave(start, jnp.tanh(u), mix)
  np.testing.assert_allclose(alone, first, atol=1e-5)
  np.testing.assert_allclose(mix.pre_BxSxM, first_pre, atol=TOLERANCE)
  got, u, mix = streams[0].leave_for(streams[1], start, jnp.tanh(u), mix)
  np.testing.assert_allclose(got, first, atol=1e-5)
  np.testing.assert_allclose(mix.pre_BxSxM, second_pre, atol=TOLERANCE)
  np.testing.assert_allclose(streams[1].leave(got, jnp.tanh(u), mix), second, atol=1e-5)
