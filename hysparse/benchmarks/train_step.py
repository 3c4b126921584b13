"""A full training step against the machine's own float32 matrix rate.

The yardstick is analytic: the FLOPs of the step's matrix products (flops.py, causal, without
recomputation) over the rate of a plain matrix product timed in the same run. The step also does
what the count leaves out: gathers, softmax, top-k, the stream mix, AdamW over all parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from hysparse import config_file, flops
from hysparse.benchmarks.timing import interleaved, matmul
from hysparse.config import Config
from hysparse.nn import model as model_lib
from hysparse.training.losses import loss_fn
from hysparse.training.state import Trainer

CONFIG = "configs/bench/train_step.py"


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """Medians of one run.

  Attributes:
    step_s, forward_s: seconds of the full step and of the forward pass with its loss.
    matmul_flops_per_s: rate of the plain float32 product.
    step_flops, forward_flops: analytic.
  """

  tokens: int
  step_s: float
  forward_s: float
  matmul_flops_per_s: float
  step_flops: float
  forward_flops: float

  @property
  def fraction(self) -> float:
    """Of the machine's matrix rate that the step reaches."""
    return self.step_flops / self.step_s / self.matmul_flops_per_s

  @property
  def forward_fraction(self) -> float:
    return self.forward_flops / self.forward_s / self.matmul_flops_per_s

  def to_dict(self) -> dict[str, Any]:
    fractions = {"fraction": self.fraction, "forward_fraction": self.forward_fraction}
    return dataclasses.asdict(self) | fractions

  def __str__(self) -> str:
    rate = self.matmul_flops_per_s / 1e9
    return "\n".join(
      [
        f"matrix product, float32       {rate:8.0f} GFLOP/s",
        f"full step ({self.tokens} tokens)      {self.step_s:8.3f} s"
        f"   {self.step_flops / 1e9:7.1f} GFLOP   {self.fraction:6.1%} of the matrix rate",
        f"forward and loss              {self.forward_s:8.3f} s"
        f"   {self.forward_flops / 1e9:7.1f} GFLOP   {self.forward_fraction:6.1%}",
        f"tokens/s                      {self.tokens / self.step_s:8.0f}",
      ]
    )


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
  """One document a row of random tokens."""
  shape = (config.data.batch_size, config.data.seq_len)
  tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, shape, dtype=np.int32)
  everywhere = np.ones(shape, bool)
  return {
    "tokens": tokens,
    "targets": np.roll(tokens, -1, axis=1),
    "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
    "mask": everywhere,
    "valid": everywhere,
    "is_prompt": ~everywhere,
  }


def run(rounds: int = 7, path: str = CONFIG, overrides: tuple[str, ...] = ()) -> TrainStep:
  """Times the step of a config; `rounds` interleaved measurements, medians."""
  config = config_file.load(path, overrides)
  graphdef, model_state = model_lib.create(config)
  trainer = Trainer(config, graphdef, model_lib.abstract(config)[1], loss_fn)
  state = trainer.init(model_state)
  batch = jax.device_put(random_batch(config))

  params, buffers = nnx.split_state(model_state, nnx.Param, ...)
  forward = jax.jit(lambda p, b: loss_fn(graphdef, p, b, batch, config)[0])
  # The step is timed without donation, so that every round starts from the same state.
  step = jax.jit(trainer.step)
  product, product_flops = matmul()
  seconds = interleaved(
    {
      "matmul": product,
      "step": lambda: step(state, batch),
      "forward": lambda: forward(params, buffers),
    },
    rounds,
  )
  batch_size, seq_len = batch["tokens"].shape
  return TrainStep(
    tokens=batch_size * seq_len,
    step_s=seconds["step"],
    forward_s=seconds["forward"],
    matmul_flops_per_s=product_flops / seconds["matmul"],
    step_flops=flops.train_step_flops(config.model, batch_size, seq_len),
    forward_flops=batch_size * sum(flops.forward_flops(config.model, seq_len).values()),
  )
