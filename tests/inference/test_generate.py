"""The cache-free loop: greedy choices are the forward pass's own, seeds reproduce, stops stop."""

import jax.numpy as jnp
import numpy as np
import pytest
import small

from hysparse.inference.generate import generate
from hysparse.nn.batch import Batch

LENGTH = 32


def greedy(tokens, **options):
  cfg = small.config()
  graphdef, state = small.model(cfg)
  return generate(graphdef, state, np.asarray(tokens), 8, length=LENGTH, **options)


def test_greedy_tokens_are_the_forward_pass_choices():
  cfg = small.config()
  prompt = np.asarray(small.tokens(cfg, 1, 11)[0])
  text = greedy(prompt)
  assert len(text) == 8
  row = np.concatenate([prompt, text, np.zeros(LENGTH - 19, np.int32)])[None]
  choices = small.logits(cfg, Batch.of(jnp.asarray(row)))[0].argmax(-1)
  np.testing.assert_array_equal(text, choices[10:18])


def test_a_stop_token_ends_the_text_and_is_not_returned():
  prompt = np.asarray(small.tokens(small.config(), 1, 11)[0])
  text = greedy(prompt)
  stopped = greedy(prompt, stop_id=int(text[3]))
  np.testing.assert_array_equal(stopped, text[: list(text).index(text[3])])


def test_seeds_reproduce_and_differ():
  prompt = [1, 2, 3]
  a, b, c = (greedy(prompt, temperature=2.0, seed=s) for s in (0, 0, 1))
  np.testing.assert_array_equal(a, b)
  assert (a != c).any()


def test_long_prompts_keep_their_end_and_empty_ones_are_refused():
  prompt = np.asarray(small.tokens(small.config(), 1, 100)[0])
  np.testing.assert_array_equal(greedy(prompt), greedy(prompt[-(LENGTH - 8) :]))
  with pytest.raises(ValueError, match="at least 1 token"):
    greedy([])
