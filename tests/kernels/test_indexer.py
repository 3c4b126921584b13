"""The indexer: backends against the plain definition, the tie contract, and the pool."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hysparse_kernels import compat, tuning
from hysparse_kernels.compat import einsum
from hysparse_kernels.formats import Stored
from hysparse_kernels.indexer import Pool, running, score_rows
from hysparse_kernels.indexer import select as select_on_platform
from hysparse_kernels.indexer.scores import weighted
from hysparse_kernels.indexer.specs import SPECS, Spec
from hysparse_kernels.paged import Paged
from hysparse_kernels.selection import top_visible

# Scores are sums of up to 32 heads x 128 products; two orders of summation differ by this much.
SCORE_TOLERANCE = 2e-5

# Quantising takes long to compile: one packed spec for every day.
by_name = pytest.mark.parametrize(
  "spec",
  [pytest.param(s, marks=[] if s.index_k in ("f32", "fp8") else pytest.mark.slow) for s in SPECS],
  ids=lambda spec: spec.name,
)
both = pytest.mark.parametrize(
  "backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"]
)
with_kernel = pytest.mark.parametrize("backend", ["reference", "xla", "pallas_tpu"])


def select(backend="auto", **arguments):
  """The operation, with kernels run step by step."""
  here = contextlib.nullcontext()
  with compat.target("tpu", interpret=True) if backend == "pallas_tpu" else here:
    return select_on_platform(**arguments, backend=backend)


def contiguous(keys):
  """[B, T, D] values of paged keys."""
  return keys.read(jnp.arange(keys.entries)).decode()


def oracle(
  q_BxSxIxD,
  keys,
  weights_BxSxI,
  lo_BxS,
  hi_BxS,
  top_k,
  block_size=8,
  pool_blocks=0,
  within=None,
):
  """Float64 scores and a stable sort: ties go to the lower entry by construction."""
  q, k, w = (np.asarray(x, np.float64) for x in (q_BxSxIxD, contiguous(keys), weights_BxSxI))
  scores = np.einsum("bsit,bsi->bst", np.maximum(np.einsum("bsid,btd->bsit", q, k), 0), w)
  rows = np.full((*scores.shape[:2], min(top_k, scores.shape[-1])), -1)
  pools = []
  for b, s in np.ndindex(scores.shape[:2]):
    lo, hi = int(lo_BxS[b, s]), int(hi_BxS[b, s])
    ids = np.arange(lo, hi)
    if within is not None:
      ids = ids[np.isin(ids // within.block_size, within.blocks_BxSxN[b, s])]
    best = ids[np.argsort(-scores[b, s, ids], kind="stable")][:top_k]
    rows[b, s, : len(best)] = np.sort(best)
    blocks = sorted({t // block_size for t in range(lo, hi)})
    value = {j: max(scores[b, s, t] for t in range(lo, hi) if t // block_size == j) for j in blocks}
    if blocks:
      value[(hi - 1) // block_size] = np.inf
    pools.append(sorted(sorted(blocks, key=lambda j: (-value[j], j))[:pool_blocks]))
  return rows, pools


@by_name
@both
def test_selection_and_pool_equal_a_stable_sort(spec, backend):
  arguments = spec.arguments()
  result = select(**arguments, backend=backend)
  rows, pools = oracle(**arguments)
  np.testing.assert_array_equal(result.rows_BxSxK, rows)
  if spec.pool_blocks:
    got = np.asarray(result.pool.blocks_BxSxN).reshape(len(pools), -1)
    assert [[j for j in row if j >= 0] for row in got.tolist()] == pools
  visible = np.asarray(arguments["hi_BxS"] - arguments["lo_BxS"])
  if spec.hidden:
    assert (visible == 0).all()
  elif spec.name != "k_above_entries":
    assert (visible > spec.top_k).any(), "nothing was really dropped"


@both
@pytest.mark.parametrize("blocks", [1, 2, 40])
def test_a_pool_restricts_to_whole_blocks_and_pads_when_small(backend, blocks):
  spec = Spec("pooled", batch=2, queries=5, before=900, top_k=9, pool_blocks=blocks)
  arguments = spec.arguments()
  pool = select(**arguments, backend="reference").pool
  arguments["pool_blocks"] = 0
  rng = np.random.default_rng(1)
  arguments["q_BxSxIxD"] = jnp.asarray(rng.normal(size=arguments["q_BxSxIxD"].shape), jnp.float32)
  rows = np.asarray(select(**arguments, within=pool, backend=backend).rows_BxSxK)
  free = np.asarray(select(**arguments, backend=backend).rows_BxSxK)
  assert (rows != free).any(), "the pool excluded nothing"
  mask = np.asarray(pool.mask(arguments["keys"].entries))
  hi = np.asarray(arguments["hi_BxS"])
  for b, s in np.ndindex(rows.shape[:2]):
    chosen = rows[b, s][rows[b, s] >= 0]
    allowed = mask[b, s, : hi[b, s]].sum()
    assert len(chosen) == min(spec.top_k, allowed)
    assert mask[b, s, chosen].all() and (chosen < hi[b, s]).all()
  want = select(**arguments, within=pool, backend="reference").rows_BxSxK
  np.testing.assert_array_equal(rows, want)


def test_a_selection_inside_a_small_pool_may_publish_one():
  """Of all entries that are visible, though the selection's own keys alone could be gathered."""
  spec = Spec("published", queries=6, before=1200, top_k=12, pool_blocks=4)
  arguments = spec.arguments()
  pool = select(**arguments, backend="reference").pool
  for name in ("rows_BxSxK", "pool"):
    got, want = (
      getattr(select(**arguments, within=pool, backend=backend), name)
      for backend in ("xla", "reference")
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_gathering_the_pool_and_masking_it_agree():
  """The static rule picks by size; both paths must give the same entries."""
  wide = Spec("wide", queries=6, before=1200, top_k=12, pool_blocks=20, ties=True)
  arguments = wide.arguments()
  pool = select(**arguments, backend="xla").pool
  arguments["pool_blocks"] = 0
  gathered = select(**arguments, within=pool, backend="xla").rows_BxSxK
  padded = Pool(jnp.pad(pool.blocks_BxSxN, ((0, 0), (0, 0), (0, 300)), constant_values=-1), 4)
  masked = select(**arguments, within=padded, backend="xla").rows_BxSxK
  np.testing.assert_array_equal(gathered, masked)


def test_nan_never_selects_and_negative_zero_ties_with_zero():
  scores = jnp.array([[0.0, -0.0, jnp.nan, 0.0, -1.0, 2.0]])
  visible = jnp.ones((1, 6), bool)
  np.testing.assert_array_equal(top_visible(scores, visible, 3), [[0, 1, 5]])
  np.testing.assert_array_equal(top_visible(scores, visible, 6), [[0, 1, 3, 4, 5, -1]])
  np.testing.assert_array_equal(top_visible(scores, visible.at[0, 5].set(False), 2), [[0, 1]])


@with_kernel
def test_nan_keys_select_nothing_and_hurt_nobody(backend):
  arguments = Spec("nan", queries=6, before=30, pool_blocks=0).arguments()
  keys = contiguous(arguments["keys"]).at[0, 3].set(jnp.nan)
  arguments["keys"] = Paged.contiguous(Stored.plain(keys))
  rows = np.asarray(select(**arguments, backend=backend).rows_BxSxK)
  assert (rows >= 0).all() and not (rows == 3).any()


@with_kernel
def test_released_rounding_happens_where_the_released_code_has_it(backend):
  """Dots, products and sums are rounded to bfloat16; every value here is exact before that."""
  spec = Spec("rounded", queries=40, before=1200, top_k=40, pool_blocks=20)
  arguments = spec.arguments()
  rng = np.random.default_rng(0)
  shapes = [arguments["q_BxSxIxD"].shape, (1, arguments["keys"].entries, spec.dim)]
  shapes.append(arguments["weights_BxSxI"].shape)
  inputs = [jnp.asarray(rng.integers(-20, 21, shape) / 8, jnp.float32) for shape in shapes]
  arguments["q_BxSxIxD"], keys, arguments["weights_BxSxI"] = inputs
  arguments["keys"] = Paged.contiguous(Stored.plain(keys))
  got = select(**arguments, backend=backend, released_rounding=True)
  inputs = [np.float64(x) for x in inputs]

  def scores(dot, product, total):
    q, k, w = inputs
    dots = np.maximum(dot(np.einsum("bsid,btd->bsit", q, k)), 0)
    return total(product(w[..., None] * dots).sum(2))

  bf16 = lambda x: x.astype(jnp.bfloat16).astype(np.float64)  # noqa: E731
  plain = lambda x: x  # noqa: E731

  def rows(scores, allowed):
    hi = np.asarray(arguments["hi_BxS"])[..., None]
    ranked = np.where((np.arange(scores.shape[-1]) < hi) & allowed, scores, -np.inf)
    return np.sort(np.argsort(-ranked, axis=-1, kind="stable")[..., : spec.top_k])

  want = rows(scores(bf16, bf16, bf16), True)
  np.testing.assert_array_equal(got.rows_BxSxK, want)
  for partly in ((plain, bf16, bf16), (bf16, plain, bf16), (bf16, bf16, plain)):
    assert (rows(scores(*partly), True) != want).any(), "a rounding changes no selection"
  other = Pool(got.pool.blocks_BxSxN[:, ::-1], spec.block_size)  # of other queries: it excludes
  arguments["pool_blocks"] = 0
  within = select(**arguments, within=other, backend=backend, released_rounding=True).rows_BxSxK
  mask = np.asarray(other.mask(arguments["keys"].entries))
  want = rows(scores(bf16, bf16, bf16), mask)
  np.testing.assert_array_equal(within, want)
  assert (want != np.asarray(got.rows_BxSxK)).any()


# --- The running top-k and the kernels under it ---------------------------------------------------


def score_plainly(q, keys, weights, first, count):
  """A backend's part, from the definition; NaN where there is no entry."""
  ids = first + jnp.arange(count)
  dots = einsum("bqid,btd->bqit", q, keys.read(ids % keys.entries).decode())
  return jnp.where(ids < keys.entries, weighted(dots, weights), jnp.nan)


def first_every_day(specs):
  return [pytest.param(s, marks=[pytest.mark.slow] if i else []) for i, s in enumerate(specs)]


RUNNING = [s for s in SPECS if s.name in ("ties", "documents", "all_hidden", "many_keys", "paged")]
RUNNING += [s for s in SPECS if s.within]


@pytest.mark.parametrize("ratio", [0, 1000], ids=["pool_read", "pool_masked"])
@pytest.mark.parametrize("spec", first_every_day(RUNNING), ids=lambda spec: spec.name)
def test_a_running_top_k_over_chunks_selects_the_same(spec, ratio):
  arguments = spec.arguments()
  want = select(**arguments, backend="reference")
  chunks = []

  def score_chunk(q, keys, weights, first, count):
    chunks.append(count)
    return score_plainly(q, keys, weights, first, count)

  arguments = {"within": None} | arguments
  sizes = {"queries": 32, "chunk": 9, "pool_queries": 8, "pool_ratio": ratio}
  rows, pool = running.select(**arguments, score_chunk=score_chunk, sizes=sizes, step=3)
  np.testing.assert_array_equal(rows, want.rows_BxSxK)
  if spec.pool_blocks:
    np.testing.assert_array_equal(pool.blocks_BxSxN, want.pool.blocks_BxSxN)
  if spec.within and not spec.pool_blocks:
    assert chunks == [spec.within * spec.block_size] if ratio == 0 else chunks == [12]
  else:
    assert chunks == [12], "a whole number of steps and of blocks, once traced"


SMALL_BLOCKS = {"queries": 24, "chunk": 256, "pool_queries": 4, "keys": 128, "kernel_queries": 8}
BLOCKED = (
  Spec("tiles_of_small_pages", batch=2, queries=20, before=500, page=32, heads=3, ties=True),
  Spec("large_pages", batch=2, queries=20, before=1000, page=384, index_k="mxfp4", dim=64),
  Spec("wide_rows", queries=5, before=700, dim=128, page=64),
  Spec("uneven_pages", batch=2, queries=5, before=700, page=12),
  Spec("pool_in_place", batch=2, queries=3, before=509, within=40, pool_blocks=0, ties=True),
  Spec("pool_cut_by_pages", queries=3, before=509, page=6, within=40, pool_blocks=0, ties=True),
)


@pytest.mark.parametrize("spec", first_every_day(BLOCKED), ids=lambda spec: spec.name)
def test_a_kernel_of_many_blocks_selects_the_same(spec):
  arguments = spec.arguments()
  arrays = {k: v for k, v in arguments.items() if not isinstance(v, int)}
  call = jax.jit(lambda arrays: select(**(arguments | arrays), backend="pallas_tpu"))
  with tuning.using("indexer", "pallas_tpu", SMALL_BLOCKS | {"pool_ratio": 1}):
    got = call(arrays)
  want = select(**arguments, backend="reference")
  np.testing.assert_array_equal(got.rows_BxSxK, want.rows_BxSxK)
  if spec.pool_blocks:
    np.testing.assert_array_equal(got.pool.blocks_BxSxN, want.pool.blocks_BxSxN)


# --- Scores of rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "spec", [s for s in SPECS if s.index_k == "f32"], ids=lambda spec: spec.name
)
def test_scores_of_rows_and_their_gradients_equal_the_reference(spec):
  arguments = spec.arguments()
  keys = arguments["keys"]
  rows = keys.locate(select(**arguments).rows_BxSxK)
  inputs = (arguments["q_BxSxIxD"], keys.rows, arguments["weights_BxSxI"])
  weight = jnp.asarray(np.random.default_rng(2).normal(size=rows.shape), jnp.float32)

  def loss(inputs, backend):
    scores = score_rows(*inputs, rows, backend=backend)
    return jnp.where(rows >= 0, scores * weight, 0.0).sum()

  compiled = jax.jit(jax.value_and_grad(loss), static_argnums=1)  # far faster than op by op
  got, want = (compiled(inputs, b) for b in ("xla", "reference"))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = max(1.0, float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, atol=SCORE_TOLERANCE * scale, rtol=0)
