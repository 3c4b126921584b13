"""The arrays of a parity case by the NumPy model, named as in expected.npz and layers.npz."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy_vision
from numpy_model import Choices, NumpyModel, Told

_MAIN_HIDDEN = 2  # draft inputs of the last two prefill positions


def run_arrays(
  model: NumpyModel, name: str, prompt: int, steps: int, inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
  """All arrays of one run, without the mode in front: "A/prefill_logits"; and its margins.

  Args:
    model: in the mode that is wanted.
    name: of the run.
    prompt: tokens prefilled, S.
    steps: tokens decoded after them.
    inputs: "A/tokens" and what else the case stores as inputs; see case.json of a golden case.
  """
  tokens = inputs[f"{name}/tokens"]
  rows, found, margins = [], {}, {}
  for b in range(len(tokens)):
    types, images, embeds = images_of(model, name, b, prompt + steps, inputs)
    found |= embeds
    told = model.run(tokens[b, : prompt + steps], types, images)
    drafted = {}
    if model.t["num_nextn_predict_layers"]:
      for t in inputs[f"{name}/dspark_steps"]:
        drafted[int(t)] = model.draft(told, prompt + int(t), int(tokens[b, prompt + t + 1]))
    rows.append(_row(model, told, drafted, name, prompt, inputs))
    for kind, gap in told.margins.items():
      margins[kind] = min(gap, margins.get(kind, np.inf))
  for key in rows[0]:
    axis = 1 if key.rsplit("/", 1)[-1].startswith("decode_") else 0
    found[f"{name}/{key}"] = np.stack([row[key] for row in rows], axis)
  return found, margins


def layer_arrays(
  model: NumpyModel, prompt: int, inputs: Mapping[str, np.ndarray], layers: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Each layer alone on stored inputs, first batch row of run A: arrays of layers.npz, no mode.

  Args:
    model: in the mode that is wanted.
    prompt: tokens of run A.
    inputs: arrays of expected.npz; tokens and their types are read.
    layers: arrays of layers.npz as float32: layer{i}/input and layer{i}/pre_mix and, before each
      Engram layer, official/layer{i-1}/output or layer0/engram_input.
  """
  tokens = inputs["A/tokens"][0, :prompt]
  types = np.asarray(inputs.get("A/token_types", np.full((1, prompt), -1))[0])
  shared, choices, found = {}, Choices(), {}
  for i in range(model.t["num_hidden_layers"]):
    p, left = f"layer{i}", f"official/layer{i - 1}/output"
    if i in model.t["engram_layer_ids"]:
      if i:
        before = layers[left]
      else:
        before = np.repeat(layers[f"{p}/engram_input"][:, None], model.t["hc_mult"], axis=1)
      found[f"{p}/engram_out"], _ = model.engram(i, before.astype(np.float64), tokens, types)
    streams = layers.get(f"{p}/input", layers.get(left)).astype(np.float64)
    layer = model.layer(i, streams, layers[f"{p}/pre_mix"], shared, types, choices)
    found[f"{p}/output"], found[f"{p}/next_pre_mix"] = layer.streams, layer.pre
    found[f"{p}/attn_out"] = layer.attention
    if layer.chosen is not None:
      k = min(model.t["index_topk"], prompt // model.t["compress_ratios"][i])
      found[f"{p}/topk"] = _padded(layer.chosen, k)
  return found


def images_of(model: NumpyModel, name: str, b: int, length: int, inputs: Mapping[str, np.ndarray]):
  """Types [length] of a row's tokens, aligner rows [N, D] or None, the rows by the case's names."""
  types = np.full(length, -1)
  stored = inputs.get(f"{name}/token_types")
  if stored is None:
    return types, None, {}
  types[: stored.shape[1]] = stored[b]
  spans, found = [], {}
  while f"{name}/image{b}_{len(spans)}/patches" in inputs:
    image = f"{name}/image{b}_{len(spans)}"
    start, *grid = (int(n) for n in inputs[f"{image}/start_nh_nw"])
    found[f"{image}/embeds"] = numpy_vision.encode(model, inputs[f"{image}/patches"], tuple(grid))
    spans.append((start, found[f"{image}/embeds"]))
  images = [rows for _, rows in sorted(spans, key=lambda span: span[0])]
  return types, np.concatenate(images) if images else None, found


def _row(model: NumpyModel, told: Told, drafted, name, prompt, inputs) -> dict[str, np.ndarray]:
  """One batch row's arrays; decode arrays start with the step."""
  t, window = model.t, model.t["sliding_window"]
  found = {
    "prefill_logits": told.logits[inputs[f"{name}/logit_positions"]],
    "decode_logits": told.logits[prompt:],
  }
  for i, layer in enumerate(told.layers):
    p = f"layer{i}"
    found[f"{p}/residual"] = layer.streams[inputs[f"{name}/resid_positions"]]
    found[f"{p}/experts"] = layer.experts[:prompt]
    found[f"{p}/expert_weights"] = layer.weights[:prompt]
    ring = np.zeros((window, t["head_dim"]))
    for s in range(max(0, prompt - window), prompt):
      ring[s % window] = layer.window[s]
    found[f"{p}/window_kv"] = ring
    ratio = t["compress_ratios"][i]
    if layer.entries is not None:
      found[f"{p}/compressed_kv"] = layer.entries[: prompt // ratio]
      found[f"{p}/index_k"] = layer.keys[: prompt // ratio]
    if layer.chosen is not None:
      k = min(t["index_topk"], prompt // ratio)
      found[f"{p}/topk"] = _padded(layer.chosen[:prompt], k)
      found[f"{p}/decode_topk"] = _padded(layer.chosen[prompt:], t["index_topk"])
    if layer.pool is not None:
      found[f"{p}/candidates"] = layer.pool[:prompt, : prompt // ratio]
  if t["engram_layer_ids"]:
    found["engram_hash_ids"] = np.stack(
      [told.layers[i].rows for i in t["engram_layer_ids"]], axis=1
    )
  if told.main_hidden is not None:
    found["main_hidden"] = told.main_hidden[max(0, prompt - _MAIN_HIDDEN) : prompt]
  for step, (ids, logits, confidence) in drafted.items():
    found[f"dspark{step}/ids"] = ids
    found[f"dspark{step}/logits"] = logits
    found[f"dspark{step}/confidence"] = confidence
  return found


def _padded(chosen: list[list[int]], k: int) -> np.ndarray:
  rows = np.full((len(chosen), k), -1)
  for row, entries in zip(rows, chosen, strict=True):
    row[: len(entries)] = entries
  return rows
