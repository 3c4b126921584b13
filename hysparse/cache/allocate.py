"""Makes the arrays of a cache from the description of its components."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hysparse_kernels.formats import Stored

from hysparse.cache import layout as layout_lib
from hysparse.cache.groups import PartialGroup
from hysparse.cache.ring import EMPTY, Ring
from hysparse.cache.state import Cache, CacheError, LayerCache, Pages, Pools
from hysparse.config import Config


def allocate(
  config: Config,
  batch: int,
  max_tokens: int,
  *,
  pool_tokens: int | None = None,
  block_tokens: int | None = None,
) -> Cache:
  """An empty cache for `batch` sequences of up to `max_tokens` tokens, in whole blocks.

  It holds the formats of the precision dial, or float32 if `config.train.numerics` is "exact".

  Args:
    pool_tokens: tokens that all sequences together have blocks for. None: as many as they can
      grow to, and every sequence has its own from the start. Otherwise no sequence has any: the
      host hands them out (`blocks.BlockPool`).
    block_tokens: tokens in a block, see `layout.layout`.

  Raises:
    CacheError: no sequences, or more tokens than the model has positions for.
    ConfigError: a block size that would cut a group of tokens or a candidate block.
  """
  if not isinstance(config, Config):
    raise TypeError(f"allocate: config is a {type(config).__name__}; must be the whole Config")
  model = config.model
  if batch < 1:
    raise CacheError(f"batch: is {batch}; must be at least 1")
  if not 1 <= max_tokens <= model.max_positions:
    raise CacheError(
      f"max_tokens: is {max_tokens}; must be in 1..max_positions ({model.max_positions})"
    )
  if pool_tokens is not None and pool_tokens < 1:
    raise CacheError(f"pool_tokens: is {pool_tokens}; must be at least 1")
  precision = layout_lib.Precision.of(model, config.train.numerics)
  described = layout_lib.layout(model, precision, block_tokens=block_tokens)
  P = described.block_tokens
  each = -(-max_tokens // P)
  blocks = batch * each if pool_tokens is None else -(-pool_tokens // P)

  def made(component: layout_lib.Component, *leading: int) -> dict[str, jax.Array]:
    structs = component.structs(*leading)
    return {name: jnp.zeros(struct.shape, struct.dtype) for name, struct in structs.items()}

  def ring(component: layout_lib.Component, layers: int) -> Ring:
    parts = made(component, layers, batch, component.rows)
    rows = Stored(parts, component.format, model.head_dim)
    return Ring(rows, jnp.full((layers, batch, component.rows), EMPTY, jnp.int32))

  def run(first: int, count: int) -> LayerCache:
    """Layers of a run are alike: what the first owns, all own."""
    owned = {c.name: c for c in described if first in c.layers}
    window = next((c for name, c in owned.items() if name.startswith("window")), None)
    partial = owned.get("partial_group")
    return LayerCache(
      window=None if window is None else ring(window, count),
      partial=None if partial is None else _group(made(partial, batch, partial.rows)),
      pools=tuple(pools(owned) for _ in range(count)) if _keeps(owned) else (),
    )

  def pools(owned: dict[str, layout_lib.Component]) -> Pools:
    widths = {"main_kv": model.head_dim, "index_keys": model.index_dim}
    fields = {}
    for name in owned.keys() & widths.keys():
      parts = made(owned[name], int(blocks * P * owned[name].rows_per_token))
      fields[name] = Stored(parts, owned[name].format, widths[name])
    if "plain_kv" in owned:
      parts = made(owned["plain_kv"], blocks * P)
      format = owned["plain_kv"].format
      fields = {n: Stored({"values": x}, format, model.head_dim) for n, x in parts.items()}
    return Pools(**fields)

  draft = described.named("window_draft")
  history = described.named("engram_history")
  table = jnp.full((batch, each), -1, jnp.int32)
  if pool_tokens is None:
    table = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
  return Cache(
    layers=tuple(run(*layers) for layers in model.layers.runs()),
    drafts=ring(draft[0], model.draft_layers) if draft else None,
    history_BxL=jnp.full((batch, history[0].rows), -1, jnp.int32) if history else None,
    length_B=jnp.zeros((batch,), jnp.int32),
    error_B=jnp.zeros((batch,), bool),
    pages=Pages(table, P, blocks),
    precision=precision,
  )


def _group(parts: dict[str, jax.Array]) -> PartialGroup:
  return PartialGroup(parts["kv"], parts["score"])


def _keeps(owned: dict[str, layout_lib.Component]) -> bool:
  return any(c.lifetime == "global" for c in owned.values())
