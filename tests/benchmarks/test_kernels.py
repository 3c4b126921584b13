"""What the kernel benchmarks compare is the same work, and a device's table says what failed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels import moe as moe_op
from hysparse_kernels.catalogue import OPERATIONS
from hysparse_kernels.dispatch import BackendError
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import specs as indexer_specs

from hysparse.benchmarks import device_kernels, kernels, yardsticks

# Float32 sums in another order.
TOLERANCE = 2e-5


def normal(*shape):
  return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


@pytest.mark.slow
def test_ragged_moe_is_the_operation():
  ids = jnp.asarray(np.argsort(np.random.default_rng(0).normal(size=(30, 4)), axis=1)[:, :2])
  weights, matrices = (
    jnp.abs(normal(30, 2)),
    (normal(4, 8, 6), normal(4, 8, 6) / 3, normal(4, 6, 8)),
  )
  got = yardsticks.ragged_moe(normal(30, 8), ids, weights, *matrices)
  want = moe_op.moe(normal(30, 8), ids, weights, *matrices, limit=0.0)
  np.testing.assert_allclose(got, want, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.slow
def test_dense_attention_is_a_softmax_over_all_entries():
  q, entries = normal(3, 2, 32), Stored.of(normal(48, 32), "fp4")
  keys = entries.decode()
  want = jnp.einsum("sht,tc->shc", jax.nn.softmax(jnp.einsum("shc,tc->sht", q, keys)), keys)
  np.testing.assert_allclose(yardsticks.dense(q, entries, size=16), want, atol=TOLERANCE)


@pytest.mark.slow
def test_products_and_pools_are_those_of_scores():
  q, keys = normal(5, 3, 32), Stored.of(normal(64, 32), "mxfp4")
  dots = jnp.einsum("sid,td->sit", q, keys.decode())
  got = yardsticks.score_products(q, keys.decode(), size=16)
  np.testing.assert_allclose(got, dots[:, 0], atol=TOLERANCE * 8)
  ids = jnp.asarray(
    np.random.default_rng(1).permuted(np.tile(np.arange(64), (5, 1)), axis=1)[:, :20]
  )
  want = jax.lax.top_k(jnp.take_along_axis(dots[:, 0], ids, axis=1), 4)[1]
  np.testing.assert_array_equal(yardsticks.pooled_scores(q, keys, ids, 4), want)


def test_rows_add_up_parts_and_the_rate():
  bench = kernels.Bench()
  bench.time("op", lambda x: x + 1, jnp.zeros(8))
  bench.time("part", lambda x: x * 2, jnp.zeros(8))
  bench.compare("op", "twice the part and a product", 0.5, "part", "part", flops=1e9)
  result = bench.run(1)
  (row,) = result.rows
  assert row.yardstick_s > 1e9 / result.flops_per_s
  assert row.ratio == row.seconds / row.yardstick_s
  assert "at most 0.500" in str(result) and result.to_dict()["rows"][0]["ratio"] == row.ratio


def test_a_device_table_names_differences_and_failures():
  """A stand-in with small specs, a backend that is wrong by a tenth and one that cannot run."""
  op = OPERATIONS["indexer"]
  small = dataclasses.replace(indexer_specs.SPECS[0], name="released_prefill")

  def call(arguments, backend):
    if backend == "broken":
      raise BackendError("broken: says why\nand more")
    return arguments["weights_BxSxI"] * (1.1 if backend == "wrong" else 1.0)

  names = ("reference", "xla", "wrong", "broken", "pallas_tpu")
  op = dataclasses.replace(
    op, call=call, backends=dict.fromkeys(names, call), released=(small,), timed=(small.name,)
  )
  rows = {row.backend: row for row in device_kernels._rows("indexer", op, 1, 1e9, 1e9)}
  assert set(rows) == {"xla", "wrong", "broken"}  # no kernel of another platform, no reference
  assert rows["xla"].error is None and rows["xla"].seconds > 0
  assert abs(rows["wrong"].error - 0.1) < 1e-3
  assert rows["broken"].failure == "BackendError: broken: says why"
  assert "says why" in str(rows["broken"])


def test_what_decode_must_read_is_packed():
  spec = next(s for s in OPERATIONS["sparse_attention"].released if s.name == "released_decode")
  seconds = device_kernels._rate_of("sparse_attention", spec, copied=1.0, flops=1.0)
  assert seconds == spec.batch * (512 * 288 + 128 * 528)
