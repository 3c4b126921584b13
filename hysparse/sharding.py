"""Where arrays live when there are several devices: from the names of axes to a mesh.

Sequences, the pools of their caches and the rows of Engram tables are spread over the devices; all
other weights are on every one of them. Compiled functions follow the arrays that they are given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from hysparse_kernels.arguments import whole
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hysparse.nn.host_table import HostTable

DEVICES = "devices"
_AXES = ("layers", "batch", "rows", "pool", "table_rows")
_RULES = {"batch": DEVICES, "pool": DEVICES, "table_rows": DEVICES}


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh, and which of its axes each named axis of an array is spread over.

  Attributes:
    mesh: of devices; its axes become Auto, whatever they were (`jax.make_mesh` makes Explicit ones,
      for which every operation would need its sharding written out).
    rules: name of an axis -> axis of the mesh; axes that are not named are not spread. Names:
      "layers", "batch", "rows" and "pool" of cache components, "table_rows" of Engram tables.

  Raises:
    TypeError: a mesh or rules that are none.
    ValueError: axes of the mesh with one name, a rule for an axis that no array or no mesh has.
  """

  mesh: Mesh
  rules: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(_RULES))

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(f"placement.mesh: is a {type(self.mesh).__name__}; must be a jax Mesh")
    if not isinstance(self.rules, Mapping):
      raise TypeError(f"placement.rules: is a {type(self.rules).__name__}; must be a mapping")
    names = self.mesh.axis_names
    if len(set(names)) < len(names):
      raise ValueError(f"placement.mesh: has axes {names}; every axis must have a name of its own")
    object.__setattr__(self, "mesh", Mesh(self.mesh.devices, names))
    for name, axis in self.rules.items():
      if name not in _AXES:
        raise ValueError(f"placement.rules: no array has an axis {name!r}; must be one of {_AXES}")
      if axis not in self.mesh.axis_names:
        raise ValueError(
          f"placement: '{name}' goes to mesh axis '{axis}'; the mesh has {self.mesh.axis_names}"
        )

  @classmethod
  def over(cls, devices: int | None = None) -> Placement:
    """Over the first `devices` devices, or all.

    Raises:
      ValueError: more devices than there are.
    """
    present = jax.devices()
    if devices is not None:
      whole("devices", devices, 1, len(present))
    return cls(Mesh(present[:devices], (DEVICES,)))

  def of(self, *axes: str) -> NamedSharding:
    """Of an array whose leading axes have these names.

    Raises:
      ValueError: two of them go to the same axis of the mesh.
    """
    spread = [self.rules.get(name) for name in axes]
    used = [axis for axis in spread if axis is not None]
    if len(set(used)) < len(used):
      raise ValueError(f"placement: axes {axes} of one array go to the mesh axes {used}")
    return NamedSharding(self.mesh, PartitionSpec(*spread))

  def parts(self, axis: str) -> int:
    """Devices that an axis is spread over; its size must be a multiple."""
    return self.mesh.shape[self.rules[axis]] if axis in self.rules else 1

  def place(self, state: nnx.State) -> nnx.State:
    """The weights of a model on the devices.

    Engram tables get rows that nobody looks up behind their last, until every device has equally
    many; `HostTable`s stay where they are.
    """

    def put(path: tuple, leaf):
      value = leaf.get_value()
      if isinstance(value, HostTable):
        return leaf
      table = path[-1] == "table"
      sharding = self.of("table_rows") if table else self.of()
      spare = self.parts("table_rows") if table else 1
      move = lambda x: jax.device_put(_padded(x, spare), sharding)  # noqa: E731
      return leaf.replace(jax.tree.map(move, value))

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, put(path, leaf)) for path, leaf in flat])


def _padded(x: jax.Array, multiple: int) -> jax.Array:
  missing = -x.shape[0] % multiple if x.ndim else 0
  return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) if missing else x
