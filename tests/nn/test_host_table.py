"""A table on the host gives the rows of the same table on the device and reads nothing else."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hysparse_kernels.formats import Quantised

from hysparse.nn.host_table import HostTable
from hysparse.nn.weights import look_up

ROWS, WIDTH = 50, 64
compiled = jax.jit(lambda table, rows: look_up(nnx.Param(table), rows, jnp.float32))


def parts(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
  """All finite codes, and scales from the lowest to high ones."""
  codes = np.arange(rows * WIDTH, dtype=np.uint32).reshape(rows, WIDTH) % 127
  signs = np.random.default_rng(0).integers(0, 2, codes.shape) * 128
  scales = np.arange(rows * 2, dtype=np.uint8).reshape(rows, 2) + 60
  return (codes + signs).astype(np.uint8), scales


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 4), (0, 4), (2, 40_000)])
def test_the_same_rows_as_on_the_device(shape):
  rows = jnp.asarray(np.random.default_rng(1).integers(0, ROWS, shape), jnp.int32)
  codes, scales = parts()
  device = compiled(Quantised(jnp.asarray(codes), jnp.asarray(scales), "fp8_row"), rows)
  host = compiled(HostTable(codes, scales), rows)
  assert host.shape == (*shape, WIDTH) and host.dtype == jnp.float32
  np.testing.assert_array_equal(host, device)


def test_inside_scans_and_maps():
  table, rows = HostTable(*parts()), jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
  expected = table.lookup(rows)
  np.testing.assert_array_equal(jax.vmap(table.lookup)(rows), expected)
  _, scanned = jax.jit(lambda rows: jax.lax.scan(lambda c, r: (c, table.lookup(r)), 0, rows))(rows)
  np.testing.assert_array_equal(scanned, expected)


def test_what_is_multiplied_with_rows_has_a_gradient():
  table, rows = HostTable(*parts()), jnp.arange(5, dtype=jnp.int32)
  grad = jax.grad(lambda weight: (table.lookup(rows) * weight).sum())(jnp.ones(WIDTH))
  np.testing.assert_allclose(grad, table.lookup(rows).sum(0), rtol=1e-6)


def test_one_table_compiles_once_and_another_anew():
  codes, scales = parts()
  first, second = HostTable(codes, scales), HostTable(codes[::-1], scales[::-1])
  rows = jnp.arange(3, dtype=jnp.int32)
  lookup = jax.jit(lambda table, rows: table.lookup(rows))
  lookup(first, rows), lookup(first, rows + 1)
  assert lookup._cache_size() == 1
  np.testing.assert_array_equal(lookup(second, rows), lookup(first, ROWS - 1 - rows))
  assert jax.tree.leaves(first) == [] and first != HostTable(codes, scales)


def test_a_row_outside_is_an_error():
  with pytest.raises(
    (ValueError, jax.errors.JaxRuntimeError), match=r"rows -1\.\.50 of a table of 50"
  ):
    jax.block_until_ready(HostTable(*parts()).lookup(jnp.asarray([-1, 50])))


def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path):
  """64 GB and more in sparse files: of them only the rows that were written take room."""
  rows = (64 << 30) // WIDTH
  written = np.array([0, 17, rows // 2, rows - 1])
  codes, scales = parts(len(written))
  maps = []
  for name, values in (("codes", codes), ("scales", scales)):
    with (tmp_path / name).open("wb") as file:
      file.truncate(rows * values.shape[1])
      for row, value in zip(written, values, strict=True):
        file.seek(int(row) * values.shape[1])
        file.write(value.tobytes())
    maps.append(np.memmap(tmp_path / name, np.uint8, "r", shape=(rows, values.shape[1])))
  table = HostTable(*maps)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  found = table.lookup(jnp.asarray(written % 2**31, jnp.int32))
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  np.testing.assert_array_equal(found, HostTable(codes, scales).lookup(jnp.arange(len(written))))
  assert grown < 200_000  # KB; of 66 GB
