"""Arguments that do not fit each other are refused by name, before any backend sees them."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import close
from hysparse_kernels import (
  arguments,
  dense_attention,
  engram,
  fp4,
  hyper_connections,
  indexer,
  moe,
)
from hysparse_kernels.dispatch import BackendError
from hysparse_kernels.formats import Stored, quantise
from hysparse_kernels.paged import Paged
from hysparse_kernels.sparse_attention import View, sparse_attention

B, S, H, C, P, R, K = 2, 5, 3, 16, 7, 9, 4
N, A, E, D, F, M = 6, 2, 4, 8, 10, 3
MIXES = (2 + M) * M


def normal(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def whole(*shape):
  return jnp.zeros(shape, jnp.int32)


def attention(q_BxSxHxC, positions_BxS, window_BxPxC, tags_BxP, entries_RxC, rows_BxSxK, sink_H):
  window, entries = Stored.plain(window_BxPxC), Stored.plain(entries_RxC)
  view = View(window, tags_BxP, entries, rows_BxSxK, width=3)
  return sparse_attention(q_BxSxHxC, positions_BxS, view, sink_H, scale=0.25)


def selected(q_BxSxIxD, keys_RxD, table_BxJ, weights_BxSxI, lo_BxS, hi_BxS, within_BxSxN):
  keys = Paged(Stored.plain(keys_RxD), table_BxJ, 4)
  pool = indexer.Pool(within_BxSxN, 2)
  spans = lo_BxS, hi_BxS
  return indexer.select(q_BxSxIxD, keys, weights_BxSxI, *spans, top_k=K, within=pool)


def scored(q_BxSxIxD, keys_RxD, weights_BxSxI, rows_BxSxK):
  return indexer.score_rows(q_BxSxIxD, Stored.plain(keys_RxD), weights_BxSxI, rows_BxSxK)


def experts(x_NxD, ids_NxA, weights_NxA, w_gate_ExDxF, w_up_ExDxF, w_down_ExFxD):
  matrices = w_gate_ExDxF, w_up_ExDxF, w_down_ExFxD
  return moe.moe(x_NxD, ids_NxA, weights_NxA, *matrices, limit=1.0)


def appended(table_BxJ, ids_BxN, x_BxNxC, valid_BxN):
  paged = Paged(Stored.of(jnp.zeros((8, C)), "fp4"), table_BxJ, 4)
  return fp4.append(paged, ids_BxN, x_BxNxC, valid_BxN).rows


MIXING = {
  "fn_QxP": normal(MIXES, M * D),
  "base_Q": normal(MIXES),
  "scale_3": normal(3),
}
STREAMS = {
  "x_NxMxD": normal(N, M, D),
  "y_NxD": normal(N, D),
  "post_NxM": normal(N, M),
  "comb_NxMxM": normal(N, M, M),
}
OPTIONS = {"iters": 2, "eps": 1e-6, "norm_eps": 1e-6}
# Operation and arguments that fit, named with their axes.
CALLS = {
  "sparse_attention": (
    attention,
    {
      "q_BxSxHxC": normal(B, S, H, C),
      "positions_BxS": whole(B, S),
      "window_BxPxC": normal(B, P, C),
      "tags_BxP": whole(B, P),
      "entries_RxC": normal(R, C),
      "rows_BxSxK": whole(B, S, K),
      "sink_H": normal(H),
    },
  ),
  "select": (
    selected,
    {
      "q_BxSxIxD": normal(B, S, H, D),
      "keys_RxD": normal(8, D),
      "table_BxJ": whole(B, 2),
      "weights_BxSxI": normal(B, S, H),
      "lo_BxS": whole(B, S),
      "hi_BxS": whole(B, S),
      "within_BxSxN": jnp.broadcast_to(jnp.arange(3), (B, S, 3)),
    },
  ),
  "score_rows": (
    scored,
    {
      "q_BxSxIxD": normal(B, S, H, D),
      "keys_RxD": normal(R, D),
      "weights_BxSxI": normal(B, S, H),
      "rows_BxSxK": whole(B, S, K),
    },
  ),
  "moe": (
    experts,
    {
      "x_NxD": normal(N, D),
      "ids_NxA": whole(N, A),
      "weights_NxA": normal(N, A),
      "w_gate_ExDxF": normal(E, D, F),
      "w_up_ExDxF": normal(E, D, F),
      "w_down_ExFxD": normal(E, F, D),
    },
  ),
  "dense_attention": (
    lambda **own: dense_attention.dense_attention(**own, scale=0.25),
    {
      "q_BxSxHxC": normal(B, S, H, C),
      "k_BxTxGxC": normal(B, P, H, C),
      "v_BxTxGxC": normal(B, P, H, C),
      "lo_BxS": whole(B, S),
      "hi_BxS": whole(B, S),
    },
  ),
  "oracle_top_k": (
    lambda **own: dense_attention.oracle_top_k(**own, scale=0.25, top_k=2),
    {
      "q_BxSxHxC": normal(B, S, H, C),
      "k_BxTxGxC": normal(B, P, H, C),
      "lo_BxS": whole(B, S),
      "hi_BxS": whole(B, S),
      "lse_BxSxH": normal(B, S, H),
    },
  ),
  "fp4.append": (
    appended,
    {
      "table_BxJ": whole(B, 2),
      "ids_BxN": whole(B, N),
      "x_BxNxC": normal(B, N, C),
      "valid_BxN": jnp.ones((B, N), bool),
    },
  ),
  "coefficients": (
    lambda **own: hyper_connections.coefficients(**own, **OPTIONS),
    {"x_NxMxD": STREAMS["x_NxMxD"], **MIXING},
  ),
  "fold": (hyper_connections.fold, {"x_NxMxD": STREAMS["x_NxMxD"], "pre_NxM": normal(N, M)}),
  "update": (hyper_connections.update, STREAMS),
  "advance": (
    lambda **own: hyper_connections.advance(**own, **OPTIONS),
    {**STREAMS, "pre_NxM": normal(N, M), **MIXING},
  ),
  "engram": (
    lambda **own: engram.gate(**own, eps=1e-6),
    {
      "x_NxMxD": STREAMS["x_NxMxD"],
      "key_NxMxD": normal(N, M, D),
      "value_NxD": normal(N, D),
      "q_weight_MxD": normal(M, D),
      "k_weight_MxD": normal(M, D),
      "dead_N": jnp.zeros(N, bool),
    },
  ),
}


def axes(name):
  return name.rsplit("_", 1)[1].split("x")


@pytest.mark.parametrize("op", CALLS)
def test_no_array_may_be_shorter_longer_or_broadcast(op):
  """Along every axis that an array shares with another one."""
  call, fitting = CALLS[op]
  shared = collections.Counter(axis for name in fitting for axis in set(axes(name)))
  tried = 0
  for name, array in fitting.items():
    for at, axis in enumerate(axes(name)):
      if shared[axis] == 1 and axes(name).count(axis) == 1 and not axis.isdigit():
        continue
      twice = jnp.concatenate([array, array], axis=at)
      for wrong in (twice, jax.lax.slice_in_dim(array, 0, 1, axis=at)):
        if wrong.shape == array.shape:
          continue
        tried += 1
        with pytest.raises(ValueError, match=r"(has shape \[|: has \d+ rows; must be)"):
          jax.eval_shape(call, **(fitting | {name: wrong}))
    with pytest.raises(ValueError, match=r"has shape \[.*\]; must be \["):
      jax.eval_shape(call, **(fitting | {name: array[None]}))
  assert tried >= 4
  jax.eval_shape(call, **fitting)


@pytest.mark.parametrize("op", CALLS)
def test_empty_arrays_are_refused(op):
  call, fitting = CALLS[op]
  first = axes(next(iter(fitting)))[0]
  empty = {}
  for name, array in fitting.items():
    at = [slice(0, 0) if axis == first else slice(None) for axis in axes(name)]
    empty[name] = array[tuple(at)]
  with pytest.raises(ValueError, match=r"has shape \[0.*no axis may be empty"):
    jax.eval_shape(call, **empty)


@pytest.mark.parametrize("op", CALLS)
def test_integers_and_floats_are_not_mixed_up(op):
  call, fitting = CALLS[op]
  for name, array in fitting.items():
    if array.dtype == jnp.int32:
      for dtype in (jnp.float32, bool, jnp.uint8):
        with pytest.raises(ValueError, match=f"is {jnp.dtype(dtype)}; must be signed integers"):
          jax.eval_shape(call, **(fitting | {name: array.astype(dtype)}))
  name = next(iter(fitting))
  if name[0] in "xq" and op not in ("fold", "update", "engram"):
    with pytest.raises(ValueError, match=f"{name}: is int32; must be floating-point"):
      jax.eval_shape(call, **(fitting | {name: fitting[name].astype(jnp.int32)}))


@pytest.mark.parametrize("op", ["sparse_attention", "select", "moe", "fp4.append"])
def test_narrow_integers_count_like_wide_ones(op):
  """Row numbers are computed in int32, whatever the ids came in."""
  call, fitting = CALLS[op]
  narrow = {n: x.astype(jnp.int8) if x.dtype == jnp.int32 else x for n, x in fitting.items()}
  call = jax.jit(call)
  jax.tree.map(close, call(**narrow), call(**fitting))


def test_a_table_of_narrow_integers_reaches_every_row():
  pool = Stored.plain(jnp.zeros((600, 1)))
  for dtype in (jnp.int8, jnp.int32):
    paged = Paged(pool, jnp.asarray([[0, 5]], dtype), 100)
    assert paged.locate(jnp.asarray([[120, 30]], dtype)).tolist() == [[520, 30]]


def test_arrays_of_numpy_are_arrays():
  for op in ("moe", "sparse_attention", "select"):
    call, fitting = CALLS[op]
    want = jax.jit(call)(**fitting)
    jax.tree.map(close, call(**jax.tree.map(np.asarray, fitting)), want)


@pytest.mark.parametrize(
  ("change", "error"),
  [
    ({"rows_BxSxK": None}, "view: has one of entries and rows_BxSxK; must have both or none"),
    ({"width": 0}, "width: is 0; must be a whole number from 1 up"),
    ({"width": 2.0}, "width: is 2.0; must be a whole number from 1 up"),
    ({"window": Stored.plain(normal(B, S - 1, C)), "tags_BxP": whole(B, S - 1)}, "has 4 rows; mu"),
  ],
)
def test_views_that_cannot_be_are_refused(change, error):
  view = View(
    Stored.plain(normal(B, P, C)), whole(B, P), Stored.plain(normal(R, C)), whole(B, S, K), width=3
  )
  with pytest.raises(ValueError, match=error):
    sparse_attention(
      normal(B, S, H, C), whole(B, S), dataclasses.replace(view, **change), normal(H), scale=0.25
    )


@pytest.mark.parametrize(
  ("options", "error"),
  [
    ({"top_k": 2.0}, "top_k: is 2.0; must be a whole number from 1 up"),
    ({"top_k": 0}, "top_k: is 0; must be"),
    ({"pool_blocks": -1}, "pool_blocks: is -1; must be a whole number from 0 up"),
    ({"block_size": 0}, "block_size: is 0; must be"),
    ({"keys": Stored.plain(normal(8, D))}, "keys: is a Stored; must be Paged"),
    ({"keys": Paged(Stored.plain(normal(7, D)), whole(B, 2), 4)}, "pool: has 7 rows; must be whol"),
    ({"keys": Paged(Stored.plain(normal(8, D)), None, 8)}, "without a table must be 2 blocks"),
  ],
)
def test_selections_that_cannot_be_are_refused(options, error):
  keys = Paged(Stored.plain(normal(8, D)), whole(B, 2), 4)
  own = {"keys": keys, "weights_BxSxI": normal(B, S, H), "top_k": K}
  with pytest.raises((ValueError, TypeError), match=error):
    indexer.select(normal(B, S, H, D), lo_BxS=whole(B, S), hi_BxS=whole(B, S), **(own | options))


def test_pools_and_formats_that_cannot_be_are_refused():
  with pytest.raises(ValueError, match="format of x: is 'fp5'; must be one of"):
    fp4.pack(normal(3, C), "fp5")
  with pytest.raises(ValueError, match=r"x: has shape \[0, 16\]; no axis may be empty"):
    fp4.pack(normal(0, C), "fp4")
  with pytest.raises(ValueError, match="format of rows: is 'plain'; must be one of"):
    fp4.unpack(Stored.plain(normal(3, C)))
  plain = Paged(Stored.plain(normal(8, C)), whole(B, 2), 4)
  with pytest.raises(ValueError, match=r"format of paged\.rows: is 'plain'; must be one of"):
    fp4.append(plain, whole(B, 1), normal(B, 1, C), jnp.ones((B, 1), bool))
  with pytest.raises(TypeError, match="paged: is a Stored; must be Paged"):
    fp4.append(plain.rows, whole(B, 1), normal(B, 1, C), jnp.ones((B, 1), bool))


def test_quantised_experts_are_compared_as_they_are_stored():
  """[E, outputs, inputs]."""
  call, fitting = CALLS["moe"]
  wide = fitting | {"x_NxD": normal(N, 32)}
  for name, shape in (("w_gate", (E, 64, 32)), ("w_up", (E, 64, 32)), ("w_down", (E, 32, 64))):
    key = next(n for n in fitting if n.startswith(name))
    wide[key] = jax.eval_shape(lambda x: quantise(x, "mxfp4"), normal(*shape))
  jax.eval_shape(call, **wide)
  with pytest.raises(ValueError, match=r"w_up_ExFxD: has shape \[3, 64, 32\]; must be \[4, "):
    fewer = jax.eval_shape(lambda w: w[:3], wide["w_up_ExDxF"])
    jax.eval_shape(call, **(wide | {"w_up_ExDxF": fewer}))


def test_packing_and_appending_have_no_gradient():
  rows = normal(3, C)
  for format in ("bf16", "f32", "fp4"):
    step = jax.jit(jax.grad(lambda x, f=format: fp4.unpack(fp4.pack(x, f)).sum()))
    gradient = step(rows)
    assert not np.asarray(gradient).any()


def test_numbers_must_be_known_when_compiling():
  with pytest.raises(ValueError, match=r"scale: is .*; must be a finite number, known when com"):
    view = View(Stored.plain(normal(B, S, C)), whole(B, S), width=3)
    call = lambda scale: sparse_attention(  # noqa: E731
      normal(B, S, H, C), whole(B, S), view, normal(H), scale=scale
    )
    jax.jit(call)(1.0)
  with pytest.raises(ValueError, match="eps: is nan; must be a finite number from 0 up"):
    hyper_connections.coefficients(**CALLS["coefficients"][1], **(OPTIONS | {"eps": float("nan")}))
  with pytest.raises(TypeError, match="x_NxD: is a list; must be an array"):
    arguments.sizes(x_NxD=[1.0])


def test_a_backend_must_be_a_name():
  for backend in (["xla"], "cuda", None):
    with pytest.raises(BackendError, match=r"moe: no backend .*; it has auto, reference, xla"):
      experts_with(backend)
  with pytest.raises(BackendError, match="here run auto, reference, xla"):
    sparse_attention(
      normal(B, S, H, C), whole(B, S), View(Stored.plain(normal(B, S, C)), whole(B, S)),
      normal(H), scale=1.0, backend="pallas_tpu",
    )  # fmt: skip


def experts_with(backend):
  own = [CALLS["moe"][1][name] for name in CALLS["moe"][1]]
  return moe.moe(*own, limit=1.0, backend=backend)
