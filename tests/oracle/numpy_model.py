"""The published model a second time: NumPy, float64, one sequence, no cache, in reading order.

Written from the published description of the layers and of the files alone and sharing no code with
the package, so that the two can be wrong in the same place only if the description is. Loops are
fine: it runs on tiny shapes. Decoding needs nothing of its own, because token p of a longer
sequence gets what a decode step at p would give.

    model = NumpyModel(folder, token_map, quantised=False)
    told = model.run(tokens_S, types_S, rows_NxD)
    ids, logits, confidence = model.draft(told, position, anchor)

Letters as in the package: S tokens, M streams, D width, H heads, C latent, R rotated channels,
T entries, E experts.

Source: arXiv 2609.19969; released config.json and tensor names.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy_codecs as codecs
from independent_reader import Folder
from numpy_tables import engram_pad, hash_constants, rope_tables

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def softmax(x, axis=-1):
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def rms_norm(x, weight, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@dataclasses.dataclass
class Layer:
  """What one layer did with a sequence; None where it has no such part."""

  streams: np.ndarray  # [S, M, D] leaving it
  pre: np.ndarray  # [S, M] handed on
  attention: np.ndarray  # [S, D]
  window: np.ndarray  # [S, C]
  experts: np.ndarray  # [S, A]
  weights: np.ndarray  # [S, A]
  entered: np.ndarray  # [S, M, D] entering it, after Engram
  entries: np.ndarray | None = None  # [T, C]
  keys: np.ndarray | None = None  # [T, index width]
  chosen: list[list[int]] | None = None  # entries of each token, ascending
  pool: np.ndarray | None = None  # [S, T], at the candidate source only
  rows: np.ndarray | None = None  # [S, columns] of the Engram table


@dataclasses.dataclass
class Told:
  """What the model gives for a sequence.

  Attributes:
    logits: [S, V].
    layers: one each.
    main_hidden: [S, targets * D]; None without drafts.
    margins: {kind of choice: the smallest gap between the last taken and the first left out, over
      the standard deviation of the scores}.
  """

  logits: np.ndarray
  layers: list[Layer]
  main_hidden: np.ndarray | None
  margins: dict[str, float]


class Choices:
  """Takes the best of scores and keeps the narrowest gap of each kind of choice."""

  def __init__(self):
    self.margins: dict[str, float] = {}

  def best(self, kind: str, scores: np.ndarray, count: int) -> list[int]:
    """The `count` best, equal ones by lower number, ascending; -inf never."""
    order = [j for j in np.argsort(-scores, kind="stable") if scores[j] > -np.inf]
    if 0 < count < len(order):
      first, second = scores[order[count - 1]], scores[order[count]]
      # Scores that are exactly 0 (relu) are equal in any arithmetic: the rule for ties holds.
      if first < np.inf and not first == second == 0:
        finite = scores[np.isfinite(scores)]
        gap = (first - second) / max(finite.std(), 1e-30)
        self.margins[kind] = min(gap, self.margins.get(kind, np.inf))
    return sorted(order[:count])


class NumpyModel:
  """A released folder, computed. `quantised`: cached values are rounded as the release does."""

  def __init__(self, folder: Folder, token_map: np.ndarray | None, *, quantised: bool):
    self.config = folder.config
    self.t = folder.config["text_config"]
    self.token_map = token_map
    self.quantised = quantised
    self._folder = folder
    self._values: dict[str, np.ndarray] = {}
    self.eps = self.t["rms_norm_eps"]
    self.primes, self.offsets, self.multipliers = hash_constants(self.t)

  def w(self, name: str) -> np.ndarray:
    if name not in self._values:
      self._values[name] = self._folder.values(name)
    return self._values[name]

  def linear(self, x, name: str):
    return x @ self.w(f"{name}.weight").T

  def norm(self, x, name: str):
    return rms_norm(x, self.w(f"{name}.weight"), self.eps)

  # --- The whole model ----------------------------------------------------------------------------

  def run(self, tokens: np.ndarray, types=None, image_rows=None) -> Told:
    """Tokens [S], their types [S] (all text if None) and the aligner rows of their images."""
    t, count = self.t, self.t["num_hidden_layers"]
    types = np.full(len(tokens), TEXT) if types is None else np.asarray(types)
    streams = np.repeat(self.embed(tokens, types, image_rows)[:, None], t["hc_mult"], axis=1)
    pre = np.zeros(streams.shape[:2])
    pre[:, 0] = 1
    choices, layers, shared = Choices(), [], {}
    for i in range(count):
      rows = None
      if i in t["engram_layer_ids"]:
        streams, rows = self.engram(i, streams, tokens, types)
      layer = self.layer(i, streams, pre, shared, types, choices)
      layer.rows = rows
      layers.append(layer)
      streams, pre = layer.streams, layer.pre
    logits = self.linear(self.norm(fold(streams, pre), "norm"), "head")
    hidden = None
    if t["num_nextn_predict_layers"]:
      targets = [layers[i].entered.mean(1) for i in t["dspark_target_layer_ids"]]
      hidden = np.concatenate(targets, axis=-1)
    return Told(logits, layers, hidden, choices.margins)

  def embed(self, tokens, types, image_rows):
    is_image = types >= 0
    x = self.w("embed.weight")[np.where(is_image, 0, tokens)].copy()
    for kind, name in ((START, "start"), (NEWLINE, "newline"), (END, "end")):
      if (types == kind).any():
        x[types == kind] = self.w(f"image_{name}")
    if (types == IMAGE).any():
      x[types == IMAGE] = image_rows
    return x

  def layer(self, i, streams, pre, shared, types, choices) -> Layer:
    """One backbone layer after its Engram; `shared` carries what sources and selectors publish."""
    p, entered = f"layers.{i}", streams
    mix = self.mixes(f"{p}.hc_attn", streams)
    x = self.norm(fold(streams, pre), f"{p}.attn_norm")
    positions = np.arange(len(x))
    window = self.window_keys(p, x, positions, i)
    qr = self.norm(self.linear(x, f"{p}.attn.wq_a"), f"{p}.attn.q_norm")
    found = {}
    if self.t["compress_ratios"][i]:
      found = self.global_branch(p, i, x, qr, shared, choices)
    keys = []
    for s in range(len(x)):
      near = window[max(0, s - self.t["sliding_window"] + 1) : s + 1]
      far = shared["entries"][shared["chosen"][s]] if self.t["compress_ratios"][i] else near[:0]
      keys.append(np.concatenate([near, far]))
    y = self.attend(p, qr, keys, positions, i)
    streams, attention = mix.update(streams, y), y
    mix_ffn = self.mixes(f"{p}.hc_ffn", streams)
    x = self.norm(fold(streams, mix.pre), f"{p}.ffn_norm")
    y, experts, weights = self.moe(p, x, types >= 0, self.t["num_experts_per_tok"], choices)
    streams = mix_ffn.update(streams, y)
    return Layer(streams, mix_ffn.pre, attention, window, experts, weights, entered, **found)

  # --- Residual streams ---------------------------------------------------------------------------

  def mixes(self, name: str, streams) -> Mix:
    count, eps = self.t["hc_mult"], self.t["hc_eps"]
    flat = streams.reshape(len(streams), -1)
    mixes = flat @ self.w(f"{name}_fn").T
    mixes = mixes / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.eps)
    scale, base = self.w(f"{name}_scale"), self.w(f"{name}_base")
    a, b = count, 2 * count
    pre = sigmoid(mixes[:, :a] * scale[0] + base[:a]) + eps
    post = 2 * sigmoid(mixes[:, a:b] * scale[1] + base[a:b])
    comb = softmax((mixes[:, b:] * scale[2] + base[b:]).reshape(-1, count, count)) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(self.t["hc_sinkhorn_iters"] - 1):
      comb = comb / (comb.sum(2, keepdims=True) + eps)
      comb = comb / (comb.sum(1, keepdims=True) + eps)
    return Mix(pre, post, comb)

  # --- Attention ----------------------------------------------------------------------------------

  def rope(self, x, positions, i: int | None, *, sign: int = 1):
    """Rotates the last channels of [S, ..., C]; `i` None: a draft layer."""
    r = self.t["qk_rope_head_dim"]
    is_global = i is not None and self.t["compress_ratios"][i] > 0
    cos, sin = rope_tables(self.t, positions, is_global)
    shape = (len(x), *[1] * (x.ndim - 2), r // 2)
    cos, sin = cos.reshape(shape), sign * sin.reshape(shape)
    even, odd = x[..., -r::2], x[..., 1 - r :: 2]
    x = x.copy()
    x[..., -r:] = np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(
      *x.shape[:-1], r
    )
    return x

  def window_keys(self, p, x, positions, i):
    keys = self.norm(self.linear(x, f"{p}.attn.wkv"), f"{p}.attn.kv_norm")
    keys = self.rope(keys, positions, i)
    return codecs.fp8(keys) if self.quantised else keys

  def attend(self, p, qr, keys, positions, i):
    """Attention of each row of `qr` to its own `keys`, which are the values too: [S, D]."""
    t = self.t
    heads, width, groups = t["num_attention_heads"], t["head_dim"], t["o_groups"]
    q = self.rope(self.linear(qr, f"{p}.attn.wq_b").reshape(-1, heads, width), positions, i)
    sink = self.w(f"{p}.attn.attn_sink")
    out = np.zeros_like(q)
    for s, k in enumerate(keys):
      scores = q[s] @ k.T * width**-0.5  # [H, keys]
      scores = np.concatenate([scores, sink[:, None]], axis=1)
      out[s] = softmax(scores)[:, :-1] @ k
    out = self.rope(out, positions, i, sign=-1).reshape(len(q), groups, -1)
    wo_a = self.w(f"{p}.attn.wo_a.weight").reshape(groups, t["o_lora_rank"], -1)
    low = np.einsum("sgi,goi->sgo", out, wo_a).reshape(len(q), -1)
    return self.linear(low, f"{p}.attn.wo_b")

  def global_branch(self, p, i, x, qr, shared, choices) -> dict:
    """Publishes entries, keys, chosen entries and pool where this layer owns them."""
    t, r, found = self.t, self.t["compress_ratios"][i], {}
    if i in t["kv_source_layer_ids"]:
      latent = self.linear(x, f"{p}.attn.compressor.wkv")
      groups = len(x) // r
      if r > 1:
        latent = latent[: groups * r].reshape(groups, r, -1)
        gate = self.linear(x, f"{p}.attn.compressor.wgate")[: groups * r].reshape(latent.shape)
        latent = (latent * softmax(gate, axis=1)).sum(1)
      latent = self.norm(latent, f"{p}.attn.compressor.norm")
      at = np.arange(groups) * r
      keys = self.norm(self.linear(latent, f"{p}.attn.indexer.wk"), f"{p}.attn.indexer.k_norm")
      entries, keys = self.rope(latent, at, i), self.rope(keys, at, i)
      if self.quantised:
        entries, keys = codecs.fp4(entries), codecs.mxfp4(keys)
      shared["entries"], shared["keys"] = found["entries"], found["keys"] = entries, keys
    if i not in t["index_source_layer_ids"]:
      return found
    heads, width = t["index_n_heads"], t["index_head_dim"]
    q = self.linear(qr, f"{p}.attn.indexer.wq_b").reshape(-1, heads, width)
    q = self.rope(q, np.arange(len(x)), i)
    q = codecs.mxfp4(q) if self.quantised else q
    weights = self.linear(x, f"{p}.attn.indexer.weights_proj") * (width**-0.5 * heads**-0.5)
    dots = np.maximum(np.einsum("shd,td->sht", q, shared["keys"]), 0)
    scores = np.einsum("sh,sht->st", weights, dots)
    for s in range(len(x)):
      scores[s, (s + 1) // r :] = -np.inf
    allowed = scores if "pool" not in shared else np.where(shared["pool"], scores, -np.inf)
    chosen = [choices.best("index", row, t["index_topk"]) for row in allowed]
    shared["chosen"] = found["chosen"] = chosen
    if i == t["candidate_source_layer_id"]:
      pool = [self.pool(row, (s + 1) // r, choices) for s, row in enumerate(scores)]
      shared["pool"] = found["pool"] = np.array(pool).reshape(scores.shape)
    return found

  def pool(self, scores, visible: int, choices) -> np.ndarray:
    """The entries [T] of the best blocks, the block of the newest visible one among them."""
    size = self.t["candidate_block_size"]
    blocks = np.array([scores[b : b + size].max() for b in range(0, len(scores), size)])
    if visible:
      blocks[(visible - 1) // size] = np.inf
    taken = choices.best("candidates", blocks, self.t["candidate_topk_blocks"])
    return np.isin(np.arange(len(scores)) // size, taken)

  # --- Mixture of experts -------------------------------------------------------------------------

  def moe(self, p, x, is_image, active: int, choices):
    """[S, D], the experts [S, A] of each token and their weights [S, A]."""
    t = self.t
    logits = self.linear(x, f"{p}.ffn.gate") / t.get("gate_temp", 1.0)
    scores = {
      "sqrtsoftplus": lambda z: np.sqrt(np.logaddexp(z, 0)),
      "sigmoid": sigmoid,
      "softmax": softmax,
    }[t["scoring_func"]](logits)
    biased = scores + self.w(f"{p}.ffn.gate.bias")
    if is_image.any():
      biased[is_image] = scores[is_image] + self.w(f"{p}.ffn.gate.bias_vl")
    experts = np.array([choices.best("router", row, active) for row in biased])
    weights = np.take_along_axis(scores, experts, axis=1)
    if t["norm_topk_prob"] and active > 1:
      weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * t["routed_scaling_factor"]
    y = self.swiglu(f"{p}.ffn.shared_experts", x, np.ones(len(x)))
    for e in np.unique(experts):
      token, slot = np.nonzero(experts == e)
      y[token] += self.swiglu(f"{p}.ffn.experts.{e}", x[token], weights[token, slot])
    return y, experts, weights

  def swiglu(self, name, x, weights):
    gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
    if limit := self.t["swiglu_limit"]:
      gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return self.linear(weights[:, None] * silu(gate) * up, f"{name}.w2")

  # --- Engram -------------------------------------------------------------------------------------

  def engram(self, i, streams, tokens, types):
    """The streams [S, M, D] that it leaves and the rows [S, columns] that it looked up."""
    t, p, rows = self.t, f"layers.{i}", self.engram_rows(i, tokens, types)
    memory = self.w(f"{p}.engram.embed.weight")[rows].reshape(len(tokens), -1)
    projected = self.linear(memory, f"{p}.engram.wkv").reshape(
      len(tokens), t["hc_mult"] + 1, t["hidden_size"]
    )
    key, value = projected[:, :-1], projected[:, -1:]
    both = self.w(f"{p}.engram.q_weight") * self.w(f"{p}.engram.k_weight")
    dot = (rms_norm(streams, both, self.eps) * rms_norm(key, 1, self.eps)).sum(-1)
    dot = dot * t["hidden_size"] ** -0.5
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
    gate[types >= 0] = 0
    return streams + gate[..., None] * value, rows

  def engram_rows(self, i, tokens, types) -> np.ndarray:
    """Rows [S, columns] of the table of layer i, order major, head minor."""
    t, k = self.t, self.t["engram_layer_ids"].index(i)
    pad = int(self.token_map[engram_pad(t)])
    rows = []
    for s in range(len(tokens)):
      row, hashed, blocked = [], 0, False
      for back in range(t["engram_max_ngram_size"]):
        blocked = blocked or s < back or types[s - back] >= 0
        token = pad if blocked else int(self.token_map[tokens[s - back]])
        hashed ^= token * int(self.multipliers[k][back])
        if back:
          row += [hashed % int(prime) for prime in self.primes[k][back - 1]]
      rows.append(np.array(row) + self.offsets[k])
    return np.array(rows)

  # --- Drafts -------------------------------------------------------------------------------------

  def draft(self, told: Told, position: int, anchor: int):
    """After the backbone consumed `position`: ids [1 + N], logits [N, V], confidence [N]."""
    t, count, size = self.t, self.t["num_nextn_predict_layers"], self.t["dspark_block_size"]
    first = max(0, position - t["sliding_window"] + 1)
    past = np.arange(first, position + 1)
    at = position + 1 + np.arange(size)
    main = self.norm(self.linear(told.main_hidden[past], "mtp.0.main_proj"), "mtp.0.main_norm")
    block = np.array([anchor] + [t["dspark_noise_token_id"]] * (size - 1))
    streams = np.repeat(self.w("embed.weight")[block][:, None], t["hc_mult"], axis=1)
    pre = np.zeros(streams.shape[:2])
    pre[:, 0] = 1
    no_image, ignored = np.zeros(size, bool), Choices()
    for n in range(count):
      p = f"mtp.{n}"
      before = self.window_keys(p, main, past, None)
      mix = self.mixes(f"{p}.hc_attn", streams)
      x = self.norm(fold(streams, pre), f"{p}.attn_norm")
      keys = np.concatenate([before, self.window_keys(p, x, at, None)])
      qr = self.norm(self.linear(x, f"{p}.attn.wq_a"), f"{p}.attn.q_norm")
      streams = mix.update(streams, self.attend(p, qr, [keys] * size, at, None))
      mix_ffn = self.mixes(f"{p}.hc_ffn", streams)
      x = self.norm(fold(streams, mix.pre), f"{p}.ffn_norm")
      active = t["dspark_num_experts_per_tok"] or t["num_experts_per_tok"]
      y, _, _ = self.moe(p, x, no_image, active, ignored)
      streams, pre = mix_ffn.update(streams, y), mix_ffn.pre
    x = fold(streams, pre)
    logits = self.linear(self.norm(x, f"mtp.{count - 1}.norm"), "head")
    ids, confidence = [anchor], []
    last = f"mtp.{count - 1}"
    for n in range(size):
      embedded = self.w(f"{last}.markov_head.embed.weight")[ids[-1]]
      logits[n] += self.linear(embedded, f"{last}.markov_head.head")
      both = np.concatenate([x[n], embedded])
      confidence.append(self.linear(both, f"{last}.confidence_head.proj")[0])
      ids.append(int(logits[n].argmax()))
    return np.array(ids), logits, np.array(confidence)


@dataclasses.dataclass
class Mix:
  """What one sublayer does with the streams: pre [S, M] is for the next one."""

  pre: np.ndarray
  post: np.ndarray
  comb: np.ndarray

  def update(self, streams, y):
    return self.post[..., None] * y[:, None] + np.einsum("sij,sid->sjd", self.comb, streams)


def fold(streams, pre):
  return (pre[..., None] * streams).sum(1)
