"""A training step beside a peer: the `deepseek_v4` model of transformers, of the same sizes.

    bash scripts/bench_peers/setup.sh
    python scripts/bench.py training

Both compute a loss, its gradients and AdamW over all parameters, in float32. Rounds alternate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from hysparse import config_file
from hysparse.benchmarks.peer import Peer
from hysparse.benchmarks.timing import alternate, seconds
from hysparse.benchmarks.train_step import random_batch
from hysparse.nn import model as model_lib
from hysparse.training.losses import loss_fn
from hysparse.training.state import Trainer

CONFIG = "configs/bench/inference.py"
BATCH, LENGTH = 4, 512


@dataclasses.dataclass(frozen=True)
class Result:
  """Median seconds of a step of `BATCH` rows of `LENGTH` tokens."""

  ours_s: float
  peer_s: float
  facts: dict[str, Any]

  @property
  def ratio(self) -> float:
    return self.peer_s / self.ours_s

  def __str__(self) -> str:
    ours, peer = (BATCH * LENGTH / s for s in (self.ours_s, self.peer_s))
    head = f"training step, {BATCH} x {LENGTH} tokens"
    return (
      f"{head}: {ours:,.0f} against {peer:,.0f} tokens/s, {self.ratio:.2f}x\npeer: {self.facts}"
    )

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self) | {"ratio": self.ratio}


def run(rounds: int = 7) -> Result:
  """Alternating measurements, medians."""
  sizes = (f"data.batch_size={BATCH}", f"data.seq_len={LENGTH}")
  config = config_file.load(CONFIG, sizes)
  graphdef, model_state = model_lib.create(config)
  trainer = Trainer(config, graphdef, model_lib.abstract(config)[1], loss_fn)
  held = [trainer.init(model_state)]
  batch = jax.device_put(random_batch(config))
  step = jax.jit(trainer.step, donate_argnums=0)

  def trained() -> Any:
    held[0], metrics = step(held[0], batch)
    return held[0], metrics

  with Peer() as peer:
    ours, theirs = alternate(
      rounds,
      lambda: seconds(trained),
      lambda: peer.measure("train", batch=BATCH, tokens=LENGTH)["seconds"],
    )
    return Result(ours, theirs, peer.facts)
