"""The router: what it chooses, how it weighs, and what it must survive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels.moe import SCORE_FUNCTIONS, route

# float32 score functions of logits of up to 30.
SCORE_TOLERANCE = 3e-6

OPTIONS = {
  "top_k": 3,
  "score_func": "sqrtsoftplus",
  "gate_temp": 1.0,
  "norm_topk_prob": True,
  "route_scale": 1.5,
}


routed = jax.jit(route, static_argnames=tuple(OPTIONS))


def router_arguments(tokens=40, experts=9, width=16, scale=1.0, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(tokens, width)).astype(np.float32)
  w = (scale * rng.normal(size=(experts, width)) * width**-0.5).astype(np.float32)
  return x, w, rng.normal(size=experts).astype(np.float32)


def scores_in_float64(x, w, score_func, gate_temp):
  logits = np.float64(x) @ np.float64(w).T / gate_temp
  if score_func == "sqrtsoftplus":
    return np.sqrt(np.logaddexp(logits, 0))
  if score_func == "sigmoid":
    return 1 / (1 + np.exp(-logits))
  exponents = np.exp(logits - logits.max(1, keepdims=True))
  return exponents / exponents.sum(1, keepdims=True)


@pytest.mark.parametrize("score_func", SCORE_FUNCTIONS)
@pytest.mark.parametrize(
  ("top_k", "norm", "temperature"), [(3, True, 1.0), (2, False, 0.3), (1, True, 2.0)]
)
def test_routing_equals_float64(score_func, top_k, norm, temperature):
  x, w, bias = router_arguments(scale=4.0)
  got = routed(
    x, w, bias, top_k=top_k, score_func=score_func, gate_temp=temperature, norm_topk_prob=norm,
    route_scale=1.5,
  )  # fmt: skip
  scores = scores_in_float64(x, w, score_func, temperature)
  ids = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k]
  weights = np.take_along_axis(scores, ids, axis=1)
  if norm and top_k > 1:
    weights /= weights.sum(1, keepdims=True) + 1e-20
  np.testing.assert_array_equal(got.ids_NxA, ids)
  np.testing.assert_allclose(got.weights_NxA, 1.5 * weights, rtol=SCORE_TOLERANCE, atol=1e-7)
  np.testing.assert_allclose(got.scores_NxE, scores, rtol=SCORE_TOLERANCE, atol=1e-7)
  unbiased = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
  assert (ids != unbiased).any(), "the bias changed no choice"


def test_ties_go_to_the_lower_expert():
  x, w, _ = router_arguments(experts=3)
  got = routed(x, np.repeat(w, 3, axis=0), np.zeros(9, np.float32), **OPTIONS)
  best = np.argmax(np.asarray(got.scores_NxE), axis=1)
  np.testing.assert_array_equal(got.ids_NxA, best[:, None] + np.arange(3))


def test_the_bias_only_chooses():
  x, w, bias = router_arguments()
  cotangent = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
  options = OPTIONS | {"norm_topk_prob": False}
  loss = lambda x, w, b: (routed(x, w, b, **options).weights_NxA * cotangent).sum()  # noqa: E731
  dx, dw, dbias = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, bias)
  np.testing.assert_array_equal(dbias, 0)
  # The gradient is that of the chosen scores, the choice held.
  ids = np.asarray(routed(x, w, bias, **options).ids_NxA)
  rng = np.random.default_rng(2)
  for grad, argument in ((dx, "x"), (dw, "w")):
    direction = rng.normal(size=grad.shape)
    ends = []
    for h in (1e-6, -1e-6):
      moved = {"x": np.float64(x), "w": np.float64(w)}
      moved[argument] += h * direction
      scores = scores_in_float64(**moved, score_func="sqrtsoftplus", gate_temp=1.0)
      ends.append((1.5 * np.take_along_axis(scores, ids, axis=1) * cotangent).sum())
    slope = (ends[0] - ends[1]) / 2e-6
    size = np.linalg.norm(grad) * np.linalg.norm(direction)
    assert abs(slope - (np.asarray(grad, np.float64) * direction).sum()) < 1e-5 * size


def test_a_bias_may_differ_by_token():
  x, w, bias = router_arguments()
  image = np.arange(40) % 3 == 0
  other = -bias[::-1]
  got = routed(x, w, np.where(image[:, None], other, bias), **OPTIONS).ids_NxA
  text_ids, image_ids = (
    routed(x, w, bias, **OPTIONS).ids_NxA,
    routed(x, w, other, **OPTIONS).ids_NxA,
  )
  np.testing.assert_array_equal(got, np.where(image[:, None], image_ids, text_ids))
  assert (text_ids != image_ids).any()


@pytest.mark.parametrize("norm", [True, False])
def test_fewer_active_experts_route_as_a_smaller_top_k(norm):
  x, w, bias = router_arguments()
  options = OPTIONS | {"norm_topk_prob": norm}
  active = np.arange(40) % 4
  got = routed(x, w, bias, **options, active_N=jnp.asarray(active))
  for n in range(4):
    mine = active == n
    np.testing.assert_array_equal(got.ids_NxA[mine, n:], -1)
    np.testing.assert_array_equal(got.weights_NxA[mine, n:], 0)
    if n:
      want = routed(x, w, bias, **(options | {"top_k": n}))
      np.testing.assert_array_equal(got.ids_NxA[mine, :n], want.ids_NxA[mine])
      np.testing.assert_allclose(got.weights_NxA[mine, :n], want.weights_NxA[mine], rtol=1e-6)


@pytest.mark.parametrize("score_func", SCORE_FUNCTIONS)
@pytest.mark.parametrize("offset", [0.0, -100.0, -1000.0])
def test_large_routers_stay_finite(score_func, offset):
  """Logits of thousands of both signs, and tokens whose scores all vanish."""
  x, w, bias = router_arguments(scale=3000.0 if offset == 0 else 1.0)
  x, w = np.c_[x, np.ones_like(x[:, :1])], np.c_[w, np.full_like(w[:, :1], offset)]
  options = OPTIONS | {"score_func": score_func}

  def loss(x, w):
    routing = route(x, w, bias, **options)
    return routing.weights_NxA[:, 0].sum() + routing.scores_NxE.sum()

  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
  assert np.isfinite(value)
  for grad in grads:
    assert np.isfinite(grad).all()


def test_sqrtsoftplus_is_smooth_where_its_form_changes():
  logits = np.linspace(-60, 10, 701, dtype=np.float32)
  score = SCORE_FUNCTIONS["sqrtsoftplus"]
  want = np.sqrt(np.logaddexp(np.float64(logits), 0))
  np.testing.assert_allclose(score(logits), want, rtol=SCORE_TOLERANCE)
  slope = jax.vmap(jax.grad(score))(logits)
  want = 0.5 / (1 + np.exp(-np.float64(logits))) / want
  np.testing.assert_allclose(slope, want, rtol=SCORE_TOLERANCE)


def test_bad_router_options_are_refused_by_name():
  x, w, bias = router_arguments()
  with pytest.raises(ValueError, match="score_func: is 'relu'; must be one of sqrtsoftplus, sig"):
    route(x, w, bias, **(OPTIONS | {"score_func": "relu"}))
  with pytest.raises(ValueError, match=r"top_k: is 10; must be a whole number in 1\.\.9"):
    route(x, w, bias, **(OPTIONS | {"top_k": 10}))
