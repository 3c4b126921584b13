"""The chips that operations are compiled for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.experimental import topologies

from hysparse_kernels import compat, triton_launch

# What XLA asks of a GPU's driver when there is one: an H100 SXM, from its data sheet.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 80000000000
  memory_bandwidth: 3350000000000
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
"""


@dataclasses.dataclass(frozen=True)
class Target:
  """A chip.

  Attributes:
    platform: for tracing.
    topology: what `get_topology_desc` is asked for.
    memory: of the device in bytes; 0 where the compiler itself refuses what does not fit.
    shared: bytes that a thread block may ask for.
    capability: of a GPU, ten times its number.
  """

  platform: compat.Platform
  topology: Mapping[str, str]
  memory: int = 0
  shared: int = 0
  capability: int = 0

  def device(self) -> jax.Device:
    """A device that programs can be compiled for, not run on."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu looks for its host for minutes
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it locks a chip that is not used here
    return topologies.get_topology_desc(**self.topology).devices[0]

  @contextmanager
  def tracing(self, device: jax.Device) -> Iterator[None]:
    """What is traced inside is traced for the device."""
    cores = getattr(device, "num_cores", None)
    with (
      compat.target(self.platform, device_kind=device.device_kind),
      triton_launch.compute_capability(self.capability),
      compat.described(device.device_kind, cores, device.platform),
    ):
      yield


def _tpu(topology_name: str) -> Target:
  return Target("tpu", {"platform": "tpu", "topology_name": topology_name})


TARGETS = {
  "v5e": _tpu("v5e:2x2"),
  "v6e": _tpu("v6e:2x2"),
  "tpu7x": _tpu("tpu7x:2x2x1"),
  "sm_90": Target(
    "gpu",
    {"platform": "cuda", "topology_name": "", "topology": "1x1x1", "target_config": _H100},
    memory=80 * 10**9,
    shared=232448,
    capability=90,
  ),
}
