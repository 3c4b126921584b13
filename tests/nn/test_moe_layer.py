"""The layer around the experts: the bias of image tokens, loads, quantised weights, rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx
from hysparse_kernels.formats import quantise

from hysparse.nn.batch import Batch
from hysparse.nn.execution import Execution
from hysparse.nn.moe import MoE

VISION = {"vision_layers": 1, "vision_dim": 8, "vision_heads": 1, "vision_ffn_dim": 8}
TYPES = np.array([[-1, 0, 1, 1, 2, 3, -1, -1], [-1] * 8])

# Sums over 32 channels in another order; they may flip a rounding to bfloat16 or FP8.
TOLERANCE = {"exact": 1e-5, "official": 2**-6}

EXACT, OFFICIAL = Execution(), Execution(numerics="official")


def layer(run=EXACT, **model):
  """(graphdef, state) with random weights and biases that change many choices."""
  cfg = small.config("swa", **model).model
  graphdef, state = nnx.split(nnx.eval_shape(lambda: MoE(cfg, run, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(0)
  random = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
  return graphdef, jax.tree.map(random, state)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, state, x, batch):
  return nnx.merge(graphdef, state)(x, batch)


def inputs(dtype=jnp.float32):
  x = np.random.default_rng(1).normal(size=(2, 8, 32))
  batch = Batch.of(jnp.zeros((2, 8), jnp.int32))
  return jnp.asarray(x, dtype), dataclasses.replace(batch, token_types_BxS=jnp.asarray(TYPES))


def test_image_tokens_and_their_delimiters_are_routed_by_their_own_bias():
  moe = layer(**VISION)
  x, batch = inputs()
  text, image = (
    dataclasses.replace(batch, token_types_BxS=jnp.full_like(TYPES, kind)) for kind in (-1, 1)
  )
  _, load, _, trace = apply(*moe, x, batch)
  _, text_load, _, text_trace = apply(*moe, x, text)
  _, _, _, image_trace = apply(*moe, x, image)
  for name in ("experts", "expert_weights"):
    want = np.where((TYPES >= 0)[..., None], image_trace[name], text_trace[name])
    np.testing.assert_array_equal(trace[name], want)
  assert (trace["experts"] != text_trace["experts"]).any(), "the image bias changed no choice"
  np.testing.assert_array_equal(load.sum(-1), [2 * (TYPES < 0).sum(), 2 * (TYPES >= 0).sum()])
  images = np.asarray(trace["experts"])[TYPES >= 0].reshape(-1)
  np.testing.assert_array_equal(load[1], np.bincount(images, minlength=4))
  np.testing.assert_array_equal(text_load[1], 0)


def test_a_model_without_vision_has_one_load():
  _, load, _, _ = apply(*layer(), *inputs())
  assert load.shape == (4,) and int(load.sum()) == 2 * TYPES.size


@pytest.mark.parametrize("run", [EXACT, OFFICIAL])
def test_quantised_leaves_give_what_their_dequantised_weights_give(run):
  x, batch = inputs(run.dtype)
  graphdef, state = layer(run)

  @jax.jit
  def leaves(state):
    packed, plain = nnx.clone(state), nnx.clone(state)
    for name in ("w1", "w2", "w3"):
      q = quantise(state["experts"][name].get_value().swapaxes(1, 2), "mxfp4")
      packed["experts"][name].set_value(q)
      plain["experts"][name].set_value(q.dequantise().swapaxes(1, 2))
    return packed, plain

  (got, *_), (want, *_) = (apply(graphdef, each, x, batch) for each in leaves(state))
  assert got.dtype == want.dtype == run.dtype
  got, want = (np.asarray(y, np.float32) for y in (got, want))
  tolerance = TOLERANCE[run.numerics] * np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_official_numerics_round_inside_the_experts():
  x, batch = inputs(jnp.bfloat16)
  got, plain = (
    np.asarray(apply(*layer(run), x, batch)[0], np.float32) for run in (OFFICIAL, EXACT)
  )
  # FP8 is off by up to 2^-4 of a value, a sum of many such values by less.
  assert 2**-9 < np.abs(got - plain).mean() / np.abs(plain).mean() < 2**-4
