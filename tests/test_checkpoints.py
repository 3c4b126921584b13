"""Names, digests, round trips, damage of every file, disks that refuse."""

import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import checkpoints
from hysparse.checkpoints import CheckpointError, Checkpoints


def example(seed: int = 0) -> dict:
  """Every kind of leaf that training stores."""
  rng = np.random.default_rng(seed)
  params = {
    "runs/0/attn/wq_a/weight": jnp.asarray(rng.standard_normal((8, 512), dtype=np.float32)),
    "embed/weight": jnp.asarray(rng.standard_normal((4, 4)), jnp.bfloat16),
  }
  return {
    "params": params,
    "optimizer": optax.chain(optax.identity(), optax.adamw(0.1)).init(params),
    "map": jnp.asarray(rng.integers(0, 9, 5), jnp.int32),
    "flags": jnp.asarray([True, False]),
    "step": jnp.int32(3),
  }


def abstract(tree):
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)


def assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def store(tmp_path):
  made = []

  def make(keep=2, say=lambda text: None):
    made.append(Checkpoints(tmp_path, keep, say))
    return made[-1]

  yield make
  for one in made:
    one._manager.close()


def test_names_are_paths_and_revert():
  class Inner(nnx.Module):
    def __init__(self):
      self.weight = nnx.Param(jnp.arange(3.0))

  class Outer(nnx.Module):
    def __init__(self):
      self.runs = nnx.List([Inner() for _ in range(11)])
      self.bias = nnx.BatchStat(jnp.ones(2))

  _, state = nnx.split(Outer())
  names = checkpoints.named(state)
  assert set(names) == {f"runs/{i}/weight" for i in range(11)} | {"bias"}
  changed = {name: x + i for i, (name, x) in enumerate(names.items())}
  back = checkpoints.unnamed(changed, state)
  assert jax.tree.structure(back) == jax.tree.structure(state)
  assert_equal(checkpoints.named(back), changed)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
  place=st.integers(0, 59),
  bit=st.integers(0, 31),
  dtype=st.sampled_from(["float32", "bfloat16", "int32", "uint8"]),
)
def test_one_flipped_bit_changes_the_digest(place, bit, dtype):
  x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(jnp.dtype(dtype))
  raw = x.copy().view(f"uint{8 * x.dtype.itemsize}")
  raw.reshape(-1)[place] ^= raw.dtype.type(1 << bit % (8 * x.dtype.itemsize))
  before = checkpoints.digests({"x": jnp.asarray(x)})
  assert before == checkpoints.digests({"x": jnp.asarray(x.copy())})
  assert before != checkpoints.digests({"x": jnp.asarray(raw.view(x.dtype))})


def test_digest_sees_exchanged_elements():
  x = jnp.arange(12.0).reshape(3, 4)
  assert checkpoints.digests([x]) != checkpoints.digests([x[::-1]])
  assert checkpoints.digests([x]) != checkpoints.digests([x[:, ::-1]])


def test_round_trip_retention_and_donation(store):
  trees = {step: example(step) for step in (1, 2, 3)}
  first = store()
  copies = jax.tree.map(np.array, trees)
  for step, tree in trees.items():
    first.save(step, tree, {"index": step})
    for leaf in jax.tree.leaves(tree):  # as donation does, while the write goes on
      leaf.delete()
  first.wait()
  assert first.latest == 3
  assert sorted(p.name for p in first._folder.iterdir()) == ["2", "3"]
  restored = store().restore(abstract(copies[3]))
  assert (restored.step, restored.position) == (3, {"index": 3})
  assert_equal(restored.state, copies[3])


def test_nothing_to_restore(store):
  assert store().restore(abstract(example())) is None


def test_damage_never_passes(store, tmp_path):
  """Each file cut, removed or changed: the same arrays, or the checkpoint before, never others."""
  tree = example()
  like = abstract(tree)
  writer = store()
  writer.save(1, tree, {"index": 1})
  writer.save(2, tree, {"index": 2})
  writer.wait()
  folder = writer._folder / "2"
  rng = np.random.default_rng(0)
  noticed = 0
  for path in sorted(p for p in folder.rglob("*") if p.is_file()):
    original = path.read_bytes()
    for damage in ("cut", "removed", "changed"):
      if damage == "removed":
        path.unlink()
      else:
        content = bytearray(original[: len(original) // 2] if damage == "cut" else original)
        if damage == "changed":
          content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
      told = []
      restored = store(say=told.append).restore(like)
      assert_equal(restored.state, tree)
      assert restored.position == {"index": restored.step}
      moved = tmp_path / checkpoints.DAMAGED_FOLDER / "2"
      if restored.step == 1:
        noticed += 1
        assert len(told) == 1 and "checkpoint 2 cannot be read" in told[0]
        assert "going on from checkpoint 1" in told[0] and "\n" not in told[0]
        moved.rename(folder)
      else:
        assert restored.step == 2 and not told and not moved.exists()
      path.write_bytes(original)
  assert noticed >= 10  # the arrays, their index and the position, each in several ways


def test_the_step_of_a_damaged_checkpoint_can_be_written_again(store):
  tree = example()
  writer = store()
  for step in (1, 2):
    writer.save(step, tree, {})
  writer.wait()
  (writer._folder / "2" / "position" / "metadata").unlink()
  again = store()
  assert again.restore(abstract(tree)).step == 1
  again.save(2, tree, {"new": True})
  again.wait()
  assert store().restore(abstract(tree)).position == {"new": True}


def test_half_written_checkpoints_do_not_count(store):
  tree = example()
  writer = store()
  for step in (1, 2):
    writer.save(step, tree, {})
  writer.wait()
  # What a kill during the write leaves behind.
  (writer._folder / "2").rename(writer._folder / "2.orbax-checkpoint-tmp")
  assert store().restore(abstract(tree)).step == 1


def test_all_damaged_is_one_clear_line(store):
  tree = example()
  writer = store()
  writer.save(1, tree, {})
  writer.wait()
  (writer._folder / "1" / "state" / "manifest.ocdbt").unlink()
  with pytest.raises(CheckpointError, match=r"no checkpoint can be read \(step 1: ") as caught:
    store().restore(abstract(tree))
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda p: {**p, "embed/weight": jnp.zeros((4, 5), jnp.bfloat16)},
     r"embed/weight is bfloat16\[4, 4\]; this model has bfloat16\[4, 5\]"),
    (lambda p: {**p, "embed/weight": jnp.zeros((4, 4))},
     r"embed/weight is bfloat16\[4, 4\]; this model has float32\[4, 4\]"),
    (lambda p: {**p, "new": jnp.zeros(2)},
     r"new is absent; this model has float32\[2\]"),
    (lambda p: {k: v for k, v in p.items() if k != "embed/weight"},
     r"embed/weight is bfloat16\[4, 4\]; this model has no such array"),
  ],
)  # fmt: skip
def test_other_arrays_than_the_model_has_are_named(store, change, message):
  tree = example()
  writer = store()
  writer.save(1, tree, {})
  writer.wait()
  with pytest.raises(CheckpointError, match=message):
    store().restore(abstract({**tree, "params": change(tree["params"])}))
  assert pathlib.Path(writer._folder / "1").exists()  # a mismatch is no damage


def test_a_refusing_disk_is_one_clear_line(store, monkeypatch):
  tree = {"x": jnp.asarray(np.random.default_rng(0).standard_normal(200_000))}
  writer = store()
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # files end there, as on a full disk
  try:
    with pytest.raises(CheckpointError, match="cannot be written: ") as caught:
      writer.save(1, tree, {})
      writer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert "\n" not in str(caught.value)
  assert store().restore(abstract(tree)) is None
