"""The table's bytes against those that the arrays of a real cache take."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from hysparse import config as config_lib
from hysparse.analysis import units
from hysparse.analysis.frames import frame
from hysparse.analysis.table import Table
from hysparse.cache import allocate as allocate_lib
from hysparse.cache.layout import Precision

if TYPE_CHECKING:
  import pandas

_LIMIT = 8e9


@dataclasses.dataclass(frozen=True)
class Verified:
  """Counted and measured bytes.

  Attributes:
    counted, measured: of each component, all sequences.
    live: bytes by which all arrays of the process grew.
  """

  counted: dict[str, int]
  measured: dict[str, int]
  live: int

  @property
  def equal(self) -> bool:
    return self.counted == self.measured and sum(self.measured.values()) == self.live

  @property
  def frame(self) -> pandas.DataFrame:
    return frame(
      (
        {"component": name, "counted": count, "measured": self.measured[name]}
        for name, count in self.counted.items()
      ),
      "component",
    )

  def _repr_html_(self) -> str:
    return self.frame.to_html() + f"<p>{self}</p>"

  def __str__(self) -> str:
    verdict = "equal" if self.equal else "NOT equal"
    total = sum(self.counted.values())
    return f"counted {total:,} bytes, live arrays {self.live:,} bytes: {verdict}"

  __repr__ = __str__


def verify(table: Table, *, limit: float = _LIMIT) -> Verified:
  """Allocates the cache that a table describes, on one device, and measures it.

  What a call keeps for itself (scratch) is not part of a cache and left out; replicas would be the
  same arrays again.

  Args:
    limit: bytes above which nothing is allocated.

  Raises:
    ConfigError: another family's model, a dial that no config has, or more than `limit` bytes.
  """
  model = table.model
  if model.config is None:
    raise config_lib.ConfigError(f"verify: {model.name} ({model.family}) cannot be allocated here")
  counted: dict[str, int] = {}
  for line in table.lines:
    if line.lifetime != "scratch":
      held = line.total - line.replication
      counted[line.component] = counted.get(line.component, 0) + held
  total = sum(counted.values())
  if total > limit:
    raise config_lib.ConfigError(
      f"verify: would allocate {units.size(total)}; the limit is {units.size(limit)}: take a"
      " shorter context or a smaller batch"
    )
  config = _config(model.config, model.dial)
  before = {id(array) for array in jax.live_arrays()}
  cache = allocate_lib.allocate(config, table.batch, table.context, block_tokens=table.page)
  jax.block_until_ready(cache)
  live = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
  measured = dict.fromkeys(counted, 0)

  def add(leaf: allocate_lib.Leaf, array: jax.Array) -> None:
    name = leaf.component.name
    measured[name] = measured.get(name, 0) + array.nbytes

  jax.tree.map(add, allocate_lib.leaves(cache, config.model), cache)
  return Verified(counted, measured, live)


def _config(model: config_lib.ModelConfig, dial: Precision) -> config_lib.Config:
  """The config whose cache has this dial."""
  formats = {name: getattr(dial, name) for name in ("main_kv", "index_k", "window_kv")}
  config = config_lib.Config(
    model=dataclasses.replace(model, **formats),
    data=config_lib.DataConfig(seq_len=max(2, model.alignment)),
    train=config_lib.TrainConfig(numerics="kvquant"),
  )
  if Precision.of(config.model) != dial:
    config = dataclasses.replace(config, train=config_lib.TrainConfig(numerics="exact"))
    if Precision.of(config.model, "exact") != dial:
      raise config_lib.ConfigError(f"precision.plain_kv: no config has {dial}")
  return config
