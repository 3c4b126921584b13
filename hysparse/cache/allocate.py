"""Makes the arrays of a cache from the description of its components."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from hysparse_kernels.arguments import whole
from hysparse_kernels.formats import Stored

from hysparse.cache import layout as layout_lib
from hysparse.cache.groups import PartialGroup
from hysparse.cache.layout import Component, Part, StateLayout
from hysparse.cache.ring import Ring
from hysparse.cache.state import Cache, CacheError, LayerCache, Pages, Pools
from hysparse.config import Config, ModelConfig


@runtime_checkable
class Placement(Protocol):
  """Where arrays live when there are several devices; see `hysparse.sharding`."""

  def of(self, *axes: str) -> jax.sharding.Sharding: ...

  def parts(self, axis: str) -> int: ...


@dataclasses.dataclass(frozen=True)
class Leaf:
  """An array of a cache: one part of the rows of a component, for these of its layers."""

  component: Component
  layers: tuple[int, ...]
  part: Part

  def struct(self, batch: int, max_blocks: int, pool_tokens: int) -> jax.ShapeDtypeStruct:
    """Its shape and dtype in a cache of these sizes; `max_blocks` are those of one sequence."""
    component = self.component
    sizes = {
      "layers": len(self.layers),
      "batch": batch,
      "rows": component.rows or max_blocks,
      "pool": int(pool_tokens * component.rows_per_token),
    }
    return jax.ShapeDtypeStruct(component.shape(self.part, sizes), jnp.dtype(self.part.dtype))


def allocate(
  config: Config,
  batch: int,
  max_tokens: int,
  *,
  pool_tokens: int | None = None,
  block_tokens: int | None = None,
  placement: Placement | None = None,
) -> Cache:
  """An empty cache for `batch` sequences of up to `max_tokens` tokens, in whole blocks.

  It holds the formats of the precision dial, or float32 if `config.train.numerics` is "exact".

  Args:
    pool_tokens: tokens that all sequences together have blocks for. None: as many as they can
      grow to, and every sequence has its own from the start. Otherwise no sequence has any: the
      host hands them out (`blocks.BlockPool`).
    block_tokens: tokens in a block, see `layout.layout`.
    placement: spreads sequences and pools over devices; None: all on the default one.

  Raises:
    CacheError: a size that is no whole number from 1 up, more tokens than the model has positions
      for, an axis of an array that cannot be spread evenly.
    ConfigError: a block size that would cut a group of tokens or a candidate block.
    TypeError: a config or a placement that is none.
  """
  if not isinstance(config, Config):
    raise TypeError(f"allocate: config is a {type(config).__name__}; must be the whole Config")
  model = config.model
  if placement is not None and not isinstance(placement, Placement):
    raise TypeError(f"placement: is a {type(placement).__name__}; must be a hysparse.Placement")
  whole("batch", batch, error=CacheError)
  if whole("max_tokens", max_tokens, error=CacheError) > model.max_positions:
    raise CacheError(
      f"max_tokens: is {max_tokens}; must be in 1..max_positions ({model.max_positions})"
    )
  if pool_tokens is not None:
    whole("pool_tokens", pool_tokens, error=CacheError)
  precision = layout_lib.Precision.of(model, config.train.numerics)
  described = layout_lib.layout(model, precision, block_tokens=block_tokens)
  P = described.block_tokens
  each = -(-max_tokens // P)
  blocks = batch * each if pool_tokens is None else -(-pool_tokens // P)
  if placement is not None:
    blocks += -blocks % placement.parts("pool")
    sizes = {"batch": batch, "max_blocks": each, "pool_tokens": blocks * P}
    check = functools.partial(_check_spread, placement, sizes)
    assemble(model, described, precision, blocks, check)

  def made(leaf: Leaf) -> jax.Array:
    struct = leaf.struct(batch, each, blocks * P)
    place = None if placement is None else placement.of(*leaf.component.axes)
    return jnp.full(struct.shape, leaf.part.fill, struct.dtype, device=place)

  cache = assemble(model, described, precision, blocks, made)
  if pool_tokens is not None:
    return cache
  own = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
  if placement is not None:
    own = jax.device_put(own, placement.of("batch", "rows"))
  pages = dataclasses.replace(cache.pages, table_BxJ=own)
  return dataclasses.replace(cache, pages=pages)


def _check_spread(placement: Placement, sizes: Mapping[str, int], leaf: Leaf) -> None:
  """Refuses an array that cannot be cut into equal parts."""
  for axis, size in zip(leaf.component.axes, leaf.struct(**sizes).shape, strict=False):
    parts = placement.parts(axis)
    if size % parts:
      field = axis if axis == "batch" else f"placement: axis '{axis}' of {leaf.component.name}"
      raise CacheError(
        f"{field}: is {size}; must be a multiple of the {parts} devices that share it"
      )


def assemble(
  model: ModelConfig,
  described: StateLayout,
  precision: layout_lib.Precision,
  blocks: int,
  make: Callable[[Leaf], Any],
) -> Cache:
  """A cache whose leaves are what `make` returns for each array."""

  def parts(component: Component, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    layers = component.layers if layers is None else layers
    return {part.name: make(Leaf(component, layers, part)) for part in component.row}

  def ring(component: Component, layers: tuple[int, ...]) -> Ring:
    (tags,) = described.named("ring_tags")
    rows = Stored(parts(component, layers), component.format, model.head_dim)
    return Ring(rows, parts(tags, layers)["positions"])

  def run(first: int, count: int) -> LayerCache:
    """Layers of a run are alike: what the first owns, all own."""
    owned = {c.name: c for c in described if first in c.layers}
    layers = tuple(range(first, first + count))
    window = next((c for name, c in owned.items() if name.startswith("window")), None)
    partial = owned.get("partial_group")
    keeps = any(c.lifetime == "global" for c in owned.values())
    group = None
    if partial is not None:
      own = parts(partial, layers)
      group = PartialGroup(own["kv"], own["score"])
    return LayerCache(
      window=None if window is None else ring(window, layers),
      partial=group,
      pools=tuple(pools(owned, (layer,)) for layer in layers) if keeps else (),
    )

  def pools(owned: dict[str, Component], layer: tuple[int]) -> Pools:
    widths = {"main_kv": model.head_dim, "index_keys": model.index_dim}
    fields = {
      name: Stored(parts(owned[name], layer), owned[name].format, widths[name])
      for name in owned.keys() & widths.keys()
    }
    if plain := owned.get("plain_kv"):
      fields = {
        name: Stored({"values": x}, plain.format, model.head_dim)
        for name, x in parts(plain, layer).items()
      }
    return Pools(**fields)

  draft, history = described.named("window_draft"), described.named("engram_history")
  (table,), (status,) = described.named("block_table"), described.named("status")
  status = parts(status)
  return Cache(
    layers=tuple(run(*layers) for layers in model.layers.runs()),
    drafts=ring(draft[0], draft[0].layers) if draft else None,
    history_BxL=parts(history[0])["tokens"] if history else None,
    length_B=status["length"],
    error_B=status["error"],
    pages=Pages(parts(table)["blocks"], described.block_tokens, blocks),
    precision=precision,
  )


def leaves(cache: Cache, model: ModelConfig) -> Cache:
  """The same tree with the `Leaf` of each array in its place.

  Raises:
    CacheError: a cache of another model.
  """
  if not isinstance(model, ModelConfig):
    raise TypeError(f"config: is a {type(model).__name__}; must be a ModelConfig")
  described = layout_lib.layout(model, cache.precision, block_tokens=cache.pages.tokens)
  pages = cache.pages
  tree = assemble(model, described, cache.precision, pages.blocks, lambda leaf: leaf)
  sizes = (*pages.table_BxJ.shape, pages.blocks * pages.tokens)
  want = [leaf.struct(*sizes) for leaf in jax.tree.leaves(tree)]
  have = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(cache)]
  if jax.tree.structure(tree) != jax.tree.structure(cache) or want != have:
    raise CacheError("cache: its arrays are not those that this model's config describes")
  return tree
