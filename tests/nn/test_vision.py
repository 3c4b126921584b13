"""The image path against a float64 NumPy one written apart from it, and against the golden data."""

import dataclasses
import functools
import json
import math
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from hysparse import published
from hysparse.config import TrainConfig
from hysparse.nn import image_span, vision
from hysparse.nn.execution import Execution

CASE = pathlib.Path(__file__).parents[1] / "golden" / "tiny-vision"
FLOAT32 = 1e-5  # largest error of float32 rows of size about 1
# Every activation of the released tower is rounded to bfloat16 (2^-9 relative); an order of sums
# other than the reference's moves rows by about as much again.
OFFICIAL_RMS = 1e-2


class Images(nnx.Module):
  """What a model holds of the image path."""

  def __init__(self, config, run, *, rngs):
    self.vision = vision.VisionTower(config, run, rngs=rngs)
    self.aligner = vision.Aligner(config, rngs=rngs)

  def encode_image(self, patches, grid):
    return self.aligner(self.vision(patches, grid), grid)


@functools.cache
def golden():
  """(config, expected arrays, vision weights by published name in float64)."""
  tensors = {}
  for path in sorted(CASE.glob("*.safetensors")):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
      if name.startswith(("vision.", "aligner.")):
        assert entry["dtype"] == "BF16"
        low, high = entry["data_offsets"]
        values = np.frombuffer(raw[start + low : start + high], ml_dtypes.bfloat16)
        tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
  return published.read(str(CASE / "config.json")), np.load(CASE / "expected.npz"), tensors


def images(config, tensors, numerics="exact"):
  """(graphdef, state) of the image path with the published tensors in it."""
  run = Execution.of(TrainConfig(numerics=numerics))
  graphdef, state = nnx.split(nnx.eval_shape(lambda: Images(config, run, rngs=nnx.Rngs(params=0))))

  def tensor(path):
    if path[1] == "blocks":
      return np.stack([
        oriented(".".join(("vision", "blocks", str(i), *path[2:])))
        for i in range(config.vision_layers)
      ])  # fmt: skip
    return oriented(".".join(path).replace("vision.patch", "vision.patch_embed.proj"))

  def oriented(name):
    value = tensors[name]
    return value.T if value.ndim == 2 else value

  leaves = []
  for path, leaf in nnx.to_flat_state(state):
    value = tensor(path)
    assert value.shape == leaf.get_raw_value().shape, path
    leaves.append((path, leaf.replace(jnp.asarray(value, jnp.float32))))
  return graphdef, nnx.from_flat_state(leaves)


encode = jax.jit(vision.encode_image, static_argnums=(0, 3))


# --- The same in NumPy, one patch and one head at a time -----------------------------------------


def numpy_rows(config, w, patches, grid, eps=1e-6, scale=1.0):
  """Aligner rows, float64; `scale` multiplies the states behind the patch embedding."""
  heads, layers = config.vision_heads, config.vision_layers
  theta, ds = config.vision_theta, config.vision_merge
  n_h, n_w = grid
  width = config.vision_dim // heads

  def linear(x, name):
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

  def norm(x, name):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name + ".weight"]

  def turn(vector, row, column):
    half, quarter, out = width // 2, width // 4, vector.copy()
    for i in range(half):
      angle = (row if i < quarter else column) * theta ** (-2 * (i % quarter) / half)
      a, b = vector[i], vector[half + i]
      out[i] = a * math.cos(angle) - b * math.sin(angle)
      out[half + i] = a * math.sin(angle) + b * math.cos(angle)
    return out

  x = scale * linear(np.array([patch.reshape(-1) for patch in patches]), "vision.patch_embed.proj")
  for layer in range(layers):
    name = f"vision.blocks.{layer}."
    q, k, v = np.split(linear(norm(x, name + "norm1"), name + "attn.wqkv"), 3, axis=-1)
    mixed = np.zeros_like(x)
    for head in range(heads):
      part = slice(head * width, (head + 1) * width)
      where = [divmod(n, n_w) for n in range(n_h * n_w)]
      turned_q = np.array([turn(vector, *at) for vector, at in zip(q[:, part], where, strict=True)])
      turned_k = np.array([turn(vector, *at) for vector, at in zip(k[:, part], where, strict=True)])
      p = np.exp(turned_q @ turned_k.T / math.sqrt(width))
      mixed[:, part] = p / p.sum(-1, keepdims=True) @ v[:, part]
    x = x + linear(mixed, name + "attn.wo")
    gate, up = np.split(linear(norm(x, name + "norm2"), name + "mlp.w1"), 2, axis=-1)
    x = x + linear(gate / (1 + np.exp(-gate)) * up, name + "mlp.w2")
  x = norm(x, "vision.norm")
  squares = []
  for top in range(0, n_h, ds):
    for left in range(0, n_w, ds):
      square = [
        x[(top + dy) * n_w + left + dx][c] if top + dy < n_h and left + dx < n_w else 0.0
        for c in range(config.vision_dim)
        for dy in range(ds)
        for dx in range(ds)
      ]
      squares.append(square)
  y = linear(np.array(squares), "aligner.w1")
  y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
  return linear(y, "aligner.w2")


# --- Golden data ---------------------------------------------------------------------------------


def golden_image(row):
  """(patches, grid, first token) of the image in a batch row."""
  _, expected, _ = golden()
  start, n_h, n_w = expected[f"A/image{row}_0/start_nh_nw"].tolist()
  return expected[f"A/image{row}_0/patches"], (n_h, n_w), start


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("mode", ["exact", "kvquant", "official"])
def test_aligner_rows_of_the_reference(mode, row):
  config, expected, tensors = golden()
  patches, grid, _ = golden_image(row)
  wanted = expected[f"{mode}/A/image{row}_0/embeds"]
  rows = encode(*images(config, tensors, mode), patches, grid)
  assert rows.dtype == (jnp.bfloat16 if mode == "official" else jnp.float32)
  error = np.asarray(rows, np.float64) - wanted
  if mode == "official":
    rms = np.sqrt((error**2).mean() / (wanted.astype(np.float64) ** 2).mean())
    assert rms < OFFICIAL_RMS
  else:
    assert np.abs(error).max() < FLOAT32


def test_the_numpy_path_is_the_reference_too():
  config, expected, tensors = golden()
  patches, grid, _ = golden_image(1)
  rows = numpy_rows(config, tensors, patches.astype(np.float64), grid)
  assert np.abs(rows - expected["exact/A/image1_0/embeds"]).max() < 1e-6  # stored in float32


@pytest.mark.parametrize("row", [0, 1])
def test_span_types_are_those_of_the_golden_prompt(row):
  config, expected, _ = golden()
  _, grid, start = golden_image(row)
  types = image_span.span_types(image_span.merged_grid(grid, config.vision_merge))
  wanted = np.full(expected["A/token_types"].shape[1], image_span.TEXT)
  wanted[start : start + len(types)] = types
  np.testing.assert_array_equal(expected["A/token_types"][row], wanted)
  tokens = expected["A/tokens"][row, : len(wanted)]
  np.testing.assert_array_equal(tokens == config.image_token_id, wanted != image_span.TEXT)


# --- What no golden case notices -----------------------------------------------------------------


def test_the_norms_add_their_own_epsilon():
  """States of about 1e-3: their mean square is about the epsilon."""
  config, _, tensors = golden()
  patches, grid, _ = golden_image(0)
  small = dict(tensors)
  for part in ("weight", "bias"):
    small[f"vision.patch_embed.proj.{part}"] = 1e-3 * tensors[f"vision.patch_embed.proj.{part}"]
  rows = np.asarray(encode(*images(config, small), patches, grid))
  with_eps, without = (numpy_rows(config, small, patches, grid, eps) for eps in (1e-6, 1e-20))
  assert np.abs(rows - with_eps).max() < FLOAT32
  assert np.abs(without - with_eps).max() > 100 * FLOAT32


def test_other_shapes_and_settings():
  """A head of 4 channels, squares of 2, another base, one row of patches, more than a key block."""
  config = dataclasses.replace(
    golden()[0], d_model=6, vision_layers=1, vision_dim=8, vision_heads=2, vision_ffn_dim=5,
    vision_patch=2, vision_theta=50.0, vision_merge=2,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  shapes = {"patch_embed.proj": (8, 12), "blocks.0.attn.wqkv": (24, 8), "blocks.0.attn.wo": (8, 8),
            "blocks.0.mlp.w1": (10, 8), "blocks.0.mlp.w2": (8, 5)}  # fmt: skip
  shapes = {f"vision.{name}": s for name, s in shapes.items()}
  shapes |= {"aligner.w1": (6, 32), "aligner.w2": (6, 6)}
  w = {f"{name}.weight": rng.normal(size=s) * s[1] ** -0.5 for name, s in shapes.items()}
  w |= {f"{name}.bias": rng.normal(size=s[0]) for name, s in shapes.items() if "mlp" not in name}
  norms = ("vision.norm", "vision.blocks.0.norm1", "vision.blocks.0.norm2")
  w |= {f"{name}.weight": np.exp(rng.normal(size=8)) for name in norms}
  for grid in ((1, 5), (13, 11)):
    patches = rng.normal(size=(grid[0] * grid[1], 3, 2, 2))
    rows = np.asarray(encode(*images(config, w), patches.astype(np.float32), grid))
    assert rows.shape == (math.prod(image_span.merged_grid(grid, 2)), 6)
    assert np.abs(rows - numpy_rows(config, w, patches, grid)).max() < FLOAT32


def test_padding_is_below_and_on_the_right_and_channels_are_slowest():
  """A 2 x 3 grid of states 10 * patch + channel in squares of 2, written out."""
  x = 10 * np.arange(1, 7)[:, None] + np.arange(2)
  first = [10, 20, 40, 50, 11, 21, 41, 51]
  second = [30, 0, 60, 0, 31, 0, 61, 0]
  np.testing.assert_array_equal(vision.unshuffle(jnp.asarray(x), (2, 3), 2), [first, second])
  tall = vision.unshuffle(jnp.asarray(x[:3]), (3, 1), 2)
  np.testing.assert_array_equal(tall, [[10, 0, 20, 0, 11, 0, 21, 0], [30, 0, 0, 0, 31, 0, 0, 0]])


def test_channels_turn_in_split_halves_first_by_row_then_by_column():
  config = SimpleNamespace(vision_dim=8, vision_heads=1, vision_theta=100.0)
  angles = np.asarray(vision.angles(config, (3, 4)))
  np.testing.assert_allclose(angles[2 * 4 + 1], [2, 0.2, 1, 0.1], rtol=1e-6)
  unit = jnp.eye(8)[None]  # as 8 heads, each with one channel set
  turned = np.asarray(vision.rotate(jnp.tile(unit, (12, 1, 1)), jnp.asarray(angles)))[2 * 4 + 1]
  wanted = np.zeros((8, 8))
  for i, angle in enumerate([2, 0.2, 1, 0.1]):
    wanted[i, i] = wanted[4 + i, 4 + i] = math.cos(angle)
    wanted[i, 4 + i], wanted[4 + i, i] = math.sin(angle), -math.sin(angle)
  np.testing.assert_allclose(turned, wanted, atol=1e-6)


def test_patches_that_do_not_fill_the_grid_are_refused():
  config, _, tensors = golden()
  graphdef, state = images(config, tensors)
  with pytest.raises(ValueError, match=r"patches: shape is \(5, 3, 14, 14\); grid \(2, 3\) needs"):
    jax.eval_shape(
      lambda patches: vision.encode_image(graphdef, state, patches, (2, 3)),
      jax.ShapeDtypeStruct((5, 3, 14, 14), jnp.float32),
    )


def test_memory_grows_with_the_patches_not_their_square():
  """The largest image of the release, 9 x 1024 patches, holds no patches x patches array."""
  config, _, tensors = golden()
  graphdef, state = images(config, tensors)
  patches = jax.ShapeDtypeStruct((96 * 96, 3, 14, 14), jnp.float32)
  analysis = encode.lower(graphdef, state, patches, (96, 96)).compile().memory_analysis()
  assert analysis.temp_size_in_bytes < 4 * (96 * 96) ** 2


# --- Spans ---------------------------------------------------------------------------------------


def test_spans_of_small_grids():
  assert image_span.merged_grid((1, 7), 3) == (1, 3)
  assert image_span.span_types((2, 2)).tolist() == [0, 1, 1, 2, 1, 1, 2, 3]


def test_images_take_the_places_of_their_tokens_row_by_row():
  config = SimpleNamespace(d_model=2)
  delimiters = image_span.Delimiters(config, rngs=nnx.Rngs(params=0))
  types = np.array([[-1, 0, 1, 1, 2, 3, -1, 0, 1, 2, 3], [-1] * 4 + [0, 1, 2, 1, 2, 3] + [-1]])
  text, pictures = np.random.default_rng(0).normal(size=(2, 2, 11, 2)).astype(np.float32)
  pictures = pictures[:, :3]
  out = np.asarray(delimiters.insert(jnp.asarray(text), jnp.asarray(types), jnp.asarray(pictures)))
  learned = {0: delimiters.start, 2: delimiters.newline, 3: delimiters.end}
  for b in range(2):
    rows = iter(pictures[b])
    for s in range(11):
      kind = types[b, s]
      wanted = text[b, s] if kind == -1 else next(rows) if kind == 1 else learned[kind][...]
      np.testing.assert_array_equal(out[b, s], wanted)


def test_an_image_token_without_a_row_is_not_a_number():
  delimiters = image_span.Delimiters(SimpleNamespace(d_model=2), rngs=nnx.Rngs(params=0))
  types = jnp.array([[1, -1, 1]])
  for rows in (0, 1):
    out = np.asarray(delimiters.insert(jnp.ones((1, 3, 2)), types, jnp.ones((1, rows, 2))))
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), [rows == 0, False, True])
