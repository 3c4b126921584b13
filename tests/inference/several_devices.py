"""Serves on four devices and on one of them; run by test_several_devices.py, which has only one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
import small
from compiling import compilations
from flax import nnx
from jax.sharding import Mesh

from hysparse.cache.allocate import allocate
from hysparse.cache.blocks import BlockPool
from hysparse.cache.state import CacheError
from hysparse.inference.engine import Engine
from hysparse.sharding import DEVICES as DEVICES_AXIS
from hysparse.sharding import Placement

DEVICES = 4
SIZES = serving.SIZES | {"slots": DEVICES}


def shares(x: jax.Array) -> list[int]:
  """Rows of each device's part of an array, along the axis it is cut."""
  return [shard.data.size * DEVICES - x.size for shard in x.addressable_shards]


def check_refusals() -> None:
  """What cannot be spread is refused before anything is moved."""
  whole = Placement.over()
  for wrong, error in (
    ({"mesh": None}, "placement.mesh: is a NoneType; must be a jax Mesh"),
    ({"rules": "batch"}, "placement.rules: is a str; must be a mapping"),
    ({"rules": {"batches": DEVICES_AXIS}}, "no array has an axis 'batches'; must be one of"),
    (
      {"mesh": Mesh(np.asarray(jax.devices()).reshape(2, 2), (DEVICES_AXIS,) * 2)},
      "every axis must have a name of its own",
    ),
  ):
    with pytest.raises((TypeError, ValueError), match=error):
      dataclasses.replace(whole, **wrong)
  rows = dataclasses.replace(whole, rules={"rows": DEVICES_AXIS})
  with pytest.raises(CacheError, match=r"placement: axis 'rows' of .*must be a multiple of the 4"):
    allocate(serving.CFG, DEVICES, 40, placement=rows)
  with pytest.raises(CacheError, match="batch: is 3; must be a multiple of the 4 devices"):
    allocate(serving.CFG, 3, 40, placement=whole)
  for wrong in (whole.mesh, "devices"):
    with pytest.raises(TypeError, match=r"placement: is a .*; must be a hysparse.Placement"):
      allocate(serving.CFG, DEVICES, 40, placement=wrong)

  cache = allocate(serving.CFG, DEVICES, 40, pool_tokens=200, placement=whole)
  installed = BlockPool(cache).install(cache)
  assert installed.pages.table_BxJ.sharding == cache.pages.table_BxJ.sharding


def main() -> None:
  graphdef, state = small.model(serving.CFG, serving.SEED)
  asked = serving.requests((5, 40, 16, 3, 30, 9), (12, 20, 5, 17, 3, 30), cfg=serving.CFG)
  spread = Engine(graphdef, state, serving.CFG, **SIZES, placement=Placement.over())
  first = serving.served(spread, asked)
  assert first == serving.served(Engine(graphdef, state, serving.CFG, **SIZES), asked)

  # Every device has a quarter of the table, of the pools and of the rings, before and after.
  tables = [leaf for path, leaf in nnx.to_flat_state(spread.state) if path[-1] == "table"]
  assert len(tables) == 1
  for leaf in tables:
    assert shares(leaf.get_value()) == [0] * DEVICES
  for leaf in jax.tree.leaves((spread._cache.layers, spread._cache.length_B)):
    assert shares(leaf) == [0] * DEVICES, leaf.sharding

  with compilations() as programs:
    assert serving.served(spread, asked) == first
  assert not programs, programs

  with pytest.raises(CacheError, match="slots: is 3; must be a multiple of the 4 devices"):
    Engine(graphdef, state, serving.CFG, **(SIZES | {"slots": 3}), placement=Placement.over())
  for wrong in (5, 0, True, 2.0, "2"):
    with pytest.raises(ValueError, match=r"devices: is .*; must be a whole number in 1\.\.4"):
      Placement.over(wrong)
  with pytest.raises(ValueError, match="of one array go to the mesh axes"):
    Placement.over().of("batch", "pool")
  with pytest.raises(ValueError, match="goes to mesh axis 'model'"):
    dataclasses.replace(Placement.over(), rules={"batch": "model"})

  check_refusals()

  # Whoever makes the mesh with jax's own function gets the same tokens.
  mesh = jax.make_mesh((DEVICES,), (DEVICES_AXIS,))
  made = Engine(graphdef, state, serving.CFG, **SIZES, placement=Placement(mesh))
  assert serving.served(made, asked) == first

  # The rows of a table are found where they are: the table itself never travels.
  placement = Placement.over()
  rows_by_width = jnp.zeros((4096, 64))
  table = jax.device_put(rows_by_width, placement.of("table_rows"))
  look_up = jax.jit(lambda table, rows: table[rows]).lower(table, np.arange(8)).compile()
  assert "all-gather" not in look_up.as_text()
  print("same tokens")


if __name__ == "__main__":
  main()
