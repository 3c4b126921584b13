"""Arrays written as they are made and read one by one: same files, digests, damage, memory."""

import os
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hysparse import checkpoint_arrays, checkpoints
from hysparse.checkpoint_arrays import Later, StoredArrays
from hysparse.checkpoints import CheckpointError, Checkpoints


def example() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    "runs/0/attn/wq_a/weight/codes": rng.integers(0, 256, (2, 8, 512), dtype=np.uint8),
    "embed/weight": rng.standard_normal((4, 5)).astype(jnp.bfloat16),
    "norm/weight": rng.standard_normal(7).astype(np.float32),
    "runs/0/ffn/gate/bias": rng.standard_normal(3).astype(np.float32),
    "token_map": rng.integers(0, 9, 5).astype(np.int32),
  }


BUFFERS = ("runs/0/ffn/gate/bias", "token_map")


def later(arrays):
  return {name: Later(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}


def assert_equal(found, expected):
  assert set(found) == set(expected)
  for name, x in expected.items():
    assert found[name].dtype == x.dtype, name
    np.testing.assert_array_equal(found[name], x)


def test_the_digest_is_that_of_checkpoints():
  arrays = example() | {
    "long": np.random.default_rng(1).integers(0, 256, 3 * 2**20 + 5, dtype=np.uint8),
    "flags": np.asarray([True, False, True]),
  }
  expected = checkpoints.digests({name: jnp.asarray(x) for name, x in arrays.items()})
  assert {name: checkpoint_arrays.digest(x) for name, x in arrays.items()} == expected


def test_round_trip_in_either_direction(tmp_path):
  arrays = example()
  checkpoint_arrays.write(tmp_path, 0, later(arrays), BUFFERS)
  stored = StoredArrays(tmp_path)
  assert stored.step == 0
  assert {n: (s.shape, s.dtype) for n, s in stored.specs.items()} == {
    n: (x.shape, x.dtype) for n, x in arrays.items()
  }
  assert_equal(stored, arrays)
  stored["embed/weight"][:] = 0  # belongs to the caller
  assert_equal(stored, arrays)

  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  groups = {
    group: {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
      for name, x in arrays.items()
      if (name in BUFFERS) == (group == "buffers")
    }
    for group in ("params", "buffers")
  }
  manager = Checkpoints(tmp_path, keep=2)
  restored = manager.restore(groups)
  assert (restored.step, restored.position) == (0, {})
  assert_equal({**restored.state["params"], **restored.state["buffers"]}, arrays)

  # What training writes is read alike, without what is not of the model.
  manager.save(5, restored.state | {"opt_state": [jnp.ones(3)], "step": jnp.int32(5)}, {"at": 1})
  manager.close()
  assert StoredArrays(tmp_path).step == 5
  assert_equal(StoredArrays(tmp_path), arrays)
  assert StoredArrays(tmp_path, step=0).step == 0
  with pytest.raises(CheckpointError, match=r"checkpoint of step 3: is missing; .* has 0, 5$"):
    StoredArrays(tmp_path, step=3)


def test_a_changed_byte_is_noticed_or_harmless(tmp_path):
  arrays = example()
  checkpoint_arrays.write(tmp_path, 0, later(arrays), BUFFERS)
  noticed, rng = 0, np.random.default_rng(0)
  for path in sorted(p for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()):
    original = path.read_bytes()
    content = bytearray(original)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)
    try:
      assert_equal(StoredArrays(tmp_path), arrays)
    except CheckpointError as error:
      assert "\n" not in str(error)
      noticed += 1
    path.write_bytes(original)
  assert noticed >= 3  # the record, the arrays' index and the arrays themselves


def test_what_goes_wrong_leaves_no_checkpoint(tmp_path):
  def refuse():
    raise KeyError("no such tensor")

  arrays = later(example())
  with pytest.raises(KeyError, match="no such tensor"):
    checkpoint_arrays.write(tmp_path, 0, arrays | {"z": Later((2,), np.dtype("f4"), refuse)})
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  big = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # files end there, as on a full disk
  try:
    with pytest.raises(CheckpointError, match="cannot be written: ") as caught:
      checkpoint_arrays.write(tmp_path, 0, later({"x": big}))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert "\n" not in str(caught.value)
  with pytest.raises(CheckpointError, match="checkpoint: is missing; the workdir has none"):
    StoredArrays(tmp_path)


_MEASURE = """
import pathlib, sys, threading, time
import numpy as np
from hysparse import checkpoint_arrays

def anonymous():
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

count, size = 32, 8 << 20
peak = [0.0]

def watch():
  while True:
    peak[0] = max(peak[0], anonymous())
    time.sleep(0.001)

def make(seed):
  return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

small = {"x": checkpoint_arrays.Later((8,), np.dtype(np.uint8), lambda: make(0)[:8])}
checkpoint_arrays.write(pathlib.Path(sys.argv[1]) / "warm", 0, small)
start = anonymous()
threading.Thread(target=watch, daemon=True).start()
arrays = {
  str(i): checkpoint_arrays.Later((size,), np.dtype(np.uint8), lambda i=i: make(i))
  for i in range(count)
}
checkpoint_arrays.write(pathlib.Path(sys.argv[1]) / "large", 0, arrays)
written = peak[0]
peak[0] = 0.0
stored = checkpoint_arrays.StoredArrays(pathlib.Path(sys.argv[1]) / "large")
for name in stored:
  stored[name]
print(written - start, peak[0] - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_arrays(tmp_path):
  command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  written, read = map(float, done.stdout.split())
  total, allowed = 32 * 8, 2 * 8 + 96  # MB: one, as much on its way, chunks that the library keeps
  assert total > 2 * allowed
  assert written < allowed, done.stdout
  assert read < allowed, done.stdout
