"""The operations that have kernels, with their specs and backends.

Tests, tuning, benchmarks and compile checks run over them. `engram`, `dense_attention` and
`indexer.score_rows` are not here: plain array operations are all that they have.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from hysparse_kernels import hyper_connections, indexer, moe, sparse_attention
from hysparse_kernels.fp4 import api as fp4_api
from hysparse_kernels.fp4 import specs as fp4_specs
from hysparse_kernels.hyper_connections import api as streams_api
from hysparse_kernels.hyper_connections import specs as stream_specs
from hysparse_kernels.indexer import api as indexer_api
from hysparse_kernels.indexer import specs as indexer_specs
from hysparse_kernels.moe import api as moe_api
from hysparse_kernels.moe import specs as moe_specs
from hysparse_kernels.sparse_attention import api as attention_api
from hysparse_kernels.sparse_attention import specs as attention_specs


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation.

  Attributes:
    call: (arguments of a spec, backend) -> a pytree of results.
    specs: with `.name` and `.arguments(seed)`.
    backends: by name.
    released: specs at the sizes of the released models, to compile and not to run.
    compiled: names of small specs that are compiled without a device, too.
    trained: names of specs whose gradient is.
    exact: all backends give the bits of the reference.
    timed: names of released specs that benchmarks and tuning run, too.
  """

  call: Callable[[Mapping[str, Any], str], Any]
  specs: tuple
  backends: Mapping[str, Callable]
  released: tuple = ()
  compiled: tuple[str, ...] = ("odd_sizes", "one_token")
  trained: tuple[str, ...] = ()
  exact: bool = False
  timed: tuple[str, ...] = ("released_prefill", "released_decode")


def separated(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """The arguments of a spec that hold arrays, or shapes of them, and the rest."""
  arrays, rest = {}, {}
  for name, value in arguments.items():
    is_data = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))
    (arrays if is_data else rest)[name] = value
  return arrays, rest


def _by_keywords(function: Callable) -> Callable:
  return lambda arguments, backend: function(**arguments, backend=backend)


def _streams(
  function: Callable, backends: Mapping[str, Callable], trained: tuple[str, ...] = ()
) -> Operation:
  """One that takes some of the arguments of the specs."""
  names = set(inspect.signature(function).parameters)

  def call(arguments: Mapping[str, Any], backend: str) -> Any:
    own = {name: x for name, x in arguments.items() if name in names}
    return function(**own, backend=backend)

  return Operation(
    call, stream_specs.SPECS, backends, released=stream_specs.RELEASED, trained=trained
  )


OPERATIONS = {
  "sparse_attention": Operation(
    _by_keywords(sparse_attention.sparse_attention),
    attention_specs.SPECS,
    attention_api.BACKENDS,
    released=attention_specs.RELEASED,
    compiled=("odd_sizes", "packed_one_token"),
    trained=("released_training",),
  ),
  "indexer": Operation(
    _by_keywords(indexer.select),
    indexer_specs.SPECS,
    indexer_api.SELECT,
    released=indexer_specs.RELEASED,
    compiled=("odd_sizes", "one_token", "paged_one_token", "within"),
    timed=("released_prefill", "released_decode", "released_within"),
  ),
  "fp4": Operation(
    fp4_specs.call, fp4_specs.SPECS, fp4_api.PACK, released=fp4_specs.RELEASED, exact=True
  ),
  # The gradients of the other three need nothing that their kernels compute.
  "hyper_connections": _streams(
    hyper_connections.advance, streams_api.ADVANCE, trained=("released_prefill",)
  ),
  "hyper_connections.coefficients": _streams(
    hyper_connections.coefficients, streams_api.COEFFICIENTS
  ),
  "hyper_connections.fold": _streams(hyper_connections.fold, streams_api.FOLD),
  "hyper_connections.update": _streams(hyper_connections.update, streams_api.UPDATE),
  "moe": Operation(
    _by_keywords(moe.moe),
    moe_specs.SPECS,
    moe_api.BACKENDS,
    released=moe_specs.RELEASED,
    timed=("released_layer",),
    trained=("bfloat16",),
  ),
}
