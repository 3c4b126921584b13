"""What a call refuses, and what its cache reports, before anything wrong is believed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from hysparse.cache.allocate import allocate
from hysparse.nn.batch import Batch
from hysparse.nn.model import draft, forward
from hysparse.nn.vision import encode_image

VISION = {
  "vision_layers": 1,
  "vision_dim": 16,
  "vision_heads": 2,
  "vision_ffn_dim": 8,
  "vision_patch": 2,
  "vision_merge": 2,
  "image_token_id": 3,
}


def test_counts_make_padding_behind_the_tokens():
  batch = Batch.of(jnp.zeros((2, 4), jnp.int32), jnp.asarray([4, 1]))
  np.testing.assert_array_equal(batch.valid_BxS, [[1, 1, 1, 1], [1, 0, 0, 0]])
  np.testing.assert_array_equal(batch.count_B, [4, 1])
  assert Batch.of([[1, 2, 3]]).tokens_BxS.shape == (1, 3)
  with pytest.raises(ValueError, match=r"tokens: have shape \(3,\); must be \[sequences, tokens\]"):
    Batch.of(jnp.zeros((3,), jnp.int32))


@pytest.mark.parametrize(
  ("act", "message"),
  [
    (
      lambda m, cfg: forward(*m, Batch.of(jnp.zeros((1, 49), jnp.int32))),
      "49 tokens.*positions is 48",
    ),
    (
      lambda m, cfg: forward(*m, Batch.of(jnp.zeros((1, 2), jnp.int32)), allocate(cfg, 2, 8)),
      "1 rows for a cache of 2 sequences",
    ),
    (lambda m, cfg: draft(*m, allocate(cfg, 1, 8), jnp.zeros((1,), int)), "no draft layers"),
    (lambda m, cfg: encode_image(*m, jnp.zeros((1, 3, 2, 2)), (1, 1)), "no vision"),
    (
      lambda m, cfg: forward(
        *m,
        dataclasses.replace(
          Batch.of(jnp.zeros((1, 2), jnp.int32)), token_types_BxS=jnp.full((1, 2), -1)
        ),
      ),
      "token types.*no vision",
    ),
    (
      lambda m, cfg: forward(
        *m,
        dataclasses.replace(
          Batch.of(jnp.zeros((1, 2), jnp.int32)), images_BxNxD=jnp.zeros((1, 1, 32))
        ),
      ),
      "no token_types_BxS",
    ),
  ],
)
def test_calls_that_do_not_fit_the_model_are_refused_in_words(act, message):
  cfg = small.config("swa", max_positions=48)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: act(small.model(cfg), cfg))


def test_image_tokens_without_features_are_reported():
  cfg = small.config("swa", **VISION)
  graphdef, state = small.model(cfg)
  batch = Batch.of(jnp.full((2, 4), 3, jnp.int32), is_prompt=True)
  types = jnp.asarray([[0, 1, 1, 2], [0, 1, 2, 3]])
  for features, bad in ((2, [False, False]), (1, [True, False])):
    images = jnp.ones((2, features, cfg.model.d_model))
    call = dataclasses.replace(batch, token_types_BxS=types, images_BxNxD=images)
    output = small.compiled(graphdef, state, call, allocate(cfg, 2, 8))
    np.testing.assert_array_equal(output.cache.error_B, bad)


def test_counts_that_do_not_fit_the_rows_are_refused():
  tokens = jnp.zeros((2, 4), jnp.int32)
  with pytest.raises(ValueError, match=r"counts: have shape \(1,\); must be \[2\]"):
    Batch.of(tokens, [3])
  with pytest.raises(ValueError, match=r"counts: are \[9, 3\]; must be in 0..4"):
    Batch.of(tokens, [9, 3])
