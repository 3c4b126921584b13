"""TPU backend: every operation is a part of one pass over the streams (`tpu_pass.py`).

Gradients are those of the xla backend, from what it also keeps: the arguments, and of `advance` the
new streams.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from hysparse_kernels.hyper_connections import xla
from hysparse_kernels.hyper_connections.tpu_pass import mixing, one_pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def coefficients(
  x_NxMxD: jax.Array,
  fn_QxP: jax.Array,
  base_Q: jax.Array,
  scale_3: jax.Array,
  iters: int,
  eps: float,
  norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  inputs = mixing(x_NxMxD, fn_QxP, base_Q, scale_3)
  return one_pass(x_NxMxD, inputs, ("coefficients",), (iters, eps, norm_eps))[0]


def _coefficients_forward(*arguments):
  return coefficients(*arguments), arguments[:4]


def _coefficients_backward(iters, eps, norm_eps, saved, gradients):
  function = functools.partial(xla.coefficients, iters=iters, eps=eps, norm_eps=norm_eps)
  return jax.vjp(function, *saved)[1](gradients)


coefficients.defvjp(_coefficients_forward, _coefficients_backward)


@jax.custom_vjp
def fold(x_NxMxD: jax.Array, pre_NxM: jax.Array) -> jax.Array:
  return one_pass(x_NxMxD, {"weights": pre_NxM}, ("u",))[0]


fold.defvjp(lambda *inputs: (fold(*inputs), inputs), xla.fold_backward)


@jax.custom_vjp
def update(
  x_NxMxD: jax.Array, y_NxD: jax.Array, post_NxM: jax.Array, comb_NxMxM: jax.Array
) -> jax.Array:
  weights = {"y": y_NxD, "weights": _columns(post_NxM, comb_NxMxM)}
  return one_pass(x_NxMxD, weights, ("x",))[0]


update.defvjp(lambda *inputs: (update(*inputs), inputs), xla.update_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9, 10))
def advance(
  x_NxMxD: jax.Array,
  y_NxD: jax.Array,
  post_NxM: jax.Array,
  comb_NxMxM: jax.Array,
  pre_NxM: jax.Array,
  fn_QxP: jax.Array,
  base_Q: jax.Array,
  scale_3: jax.Array,
  iters: int,
  eps: float,
  norm_eps: float,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  inputs = {"y": y_NxD, "weights": _columns(pre_NxM, post_NxM, comb_NxMxM)}
  inputs |= mixing(x_NxMxD, fn_QxP, base_Q, scale_3)
  return one_pass(x_NxMxD, inputs, ("x", "u", "coefficients"), (iters, eps, norm_eps))


def _advance_forward(*arguments):
  outputs = advance(*arguments)
  return outputs, (arguments[:8], outputs[0])


def _advance_backward(iters, eps, norm_eps, saved, gradients):
  (x, y, post, comb, pre, *parameters), new = saved
  dnew, du, dcoefficients = gradients
  folded, dpre = xla.fold_backward((new, pre), du)
  mixed, *dparameters = _coefficients_backward(
    iters, eps, norm_eps, (new, *parameters), dcoefficients
  )
  dnew = dnew.astype(jnp.float32) + folded.astype(jnp.float32) + mixed.astype(jnp.float32)
  return (*xla.update_backward((x, y, post, comb), dnew), dpre, *dparameters)


advance.defvjp(_advance_forward, _advance_backward)


def _columns(*weights: jax.Array) -> jax.Array:
  """Weights of each token side by side."""
  return jnp.concatenate([w.reshape(len(w), -1) for w in weights], axis=1)
