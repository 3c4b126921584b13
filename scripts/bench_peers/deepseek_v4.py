"""The peer of the benchmarks: the `deepseek_v4` model of transformers, random weights.

Runs in a virtual environment of its own (setup.sh) and knows nothing of hysparse. Each command
prints one line of JSON; `seconds` are of one prefill, of one step of the decode loop, or of one
step of training (forward, backward, AdamW):

    P=.venv-peers/bin/python
    $P scripts/bench_peers/deepseek_v4.py prefill --tokens=4096 --rounds=3
    $P scripts/bench_peers/deepseek_v4.py decode --context=1024 --batch=8 --steps=32 --rounds=5
    $P scripts/bench_peers/deepseek_v4.py train --tokens=512 --batch=4 --rounds=3
    $P scripts/bench_peers/deepseek_v4.py serve

`serve` measures on request, once for each line of JSON that it reads, so that a benchmark can
alternate its rounds with the peer's (hysparse/benchmarks/peer.py):

    {"what": "decode", "context": 1024, "batch": 1, "steps": 32}

Time it on an idle machine: the threads of torch wait for each other in a loop, so that another busy
process slows it down by far more than its share.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
import transformers

# configs/bench/inference.py is the same in hysparse, as far as the two designs correspond.
CONFIG = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# What a request may say beside "what", with the values that it need not.
FIELDS = {
  "prefill": {"tokens": 1024, "batch": 1},
  "decode": {"context": 1024, "batch": 1, "steps": 32},
  "train": {"tokens": 512, "batch": 4},
}


class Peer:
  """The model, and the caches of the contexts that were decoded from."""

  def __init__(self, threads: int):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**CONFIG)
    self.model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    self._prefilled: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
    self._warm: set[str] = set()
    self._optimizer: torch.optim.Optimizer | None = None

  def facts(self) -> dict[str, Any]:
    """What the figures belong to."""
    return {
      "peer": "deepseek_v4",
      "parameters": sum(p.numel() for p in self.model.parameters()),
      "threads": torch.get_num_threads(),
      "transformers": transformers.__version__,
      "torch": torch.__version__,
      "attention": self.model.config._attn_implementation,
      "experts": self.model.config._experts_implementation,
    }

  def measure(self, request: dict[str, Any]) -> dict[str, Any]:
    """The request with `seconds`; the first one of its kind runs once more before, unmeasured.

    Raises:
      ValueError: an unknown request, or what the model returns is wrong.
    """
    values = dict(request)
    what = values.pop("what", None)
    if what not in FIELDS:
      raise ValueError(f"what: is {what!r}; must be one of {', '.join(FIELDS)}")
    unknown = values.keys() - FIELDS[what].keys()
    if unknown:
      raise ValueError(f"{what}: unknown {sorted(unknown)}; known are {', '.join(FIELDS[what])}")
    values = FIELDS[what] | values
    for name, value in values.items():
      if type(value) is not int or value < 1:
        raise ValueError(f"{name}: is {value!r}; must be an integer of at least 1")
    run = getattr(self, what)
    key = json.dumps([what, values], sort_keys=True)
    with torch.enable_grad() if what == "train" else torch.inference_mode():
      if key not in self._warm:
        run(**values)
        self._warm.add(key)
      return {"what": what, **values, **run(**values)}

  def prefill(self, tokens: int, batch: int) -> dict[str, float]:
    """Seconds of a prompt into a new cache; of the logits only the last, as in generation."""
    prompt_BxS = self._prompt(batch, tokens)
    start = time.perf_counter()
    self._forward(prompt_BxS, None)
    return {"seconds": time.perf_counter() - start}

  def decode(self, context: int, batch: int, steps: int) -> dict[str, float]:
    """Seconds of a step of the greedy loop after `context` tokens: all of it / steps; the median.

    The mean is what a token costs: every fourth step closes an entry of the sparse layers, and the
    median leaves that out.
    """
    if (context, batch) not in self._prefilled:
      self._prefilled[context, batch] = self._forward(self._prompt(batch, context), None)
    cache, token_Bx1 = copy.deepcopy(self._prefilled[context, batch])
    times = [time.perf_counter()]
    for _ in range(steps):
      cache, token_Bx1 = self._forward(token_Bx1, cache)
      times.append(time.perf_counter())
    if cache.get_seq_length() != context + steps:
      raise ValueError(f"the cache holds {cache.get_seq_length()} tokens, not {context + steps}")
    each = [after - before for before, after in itertools.pairwise(times)]
    return {"seconds": (times[-1] - times[0]) / steps, "median_step_s": statistics.median(each)}

  def train(self, tokens: int, batch: int) -> dict[str, float]:
    """Seconds of a training step on `batch` rows: loss, gradients and AdamW over all parameters."""
    if self._optimizer is None:
      self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
    tokens_BxS = self._prompt(batch, tokens)
    start = time.perf_counter()
    self._optimizer.zero_grad(set_to_none=True)
    loss = self.model(tokens_BxS, labels=tokens_BxS, use_cache=False).loss
    loss.backward()
    self._optimizer.step()
    seconds = time.perf_counter() - start
    if not loss.isfinite():
      raise ValueError("the loss is not finite")
    return {"seconds": seconds, "loss": loss.item()}

  def _prompt(self, batch: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, CONFIG["vocab_size"], (batch, tokens), generator=generator)

  def _forward(self, tokens_BxS: torch.Tensor, cache: Any) -> tuple[Any, torch.Tensor]:
    """The grown cache and the most likely next token, [B, 1]."""
    output = self.model(tokens_BxS, cache=cache, use_cache=True, logits_to_keep=1)
    best_Bx1 = output.logits[:, -1:].max(-1)
    if not best_Bx1.values.isfinite().all():
      raise ValueError("the logits are not finite")
    return output.cache, best_Bx1.indices


def serve(peer: Peer, answers: Any) -> None:
  """One line of JSON about the peer, then one for each line of standard input, until that ends."""
  print(json.dumps(peer.facts()), file=answers, flush=True)
  for line in sys.stdin:
    try:
      answer = peer.measure(json.loads(line))
    except (ValueError, TypeError, RuntimeError) as error:
      answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--threads", type=int, default=torch.get_num_threads())
  commands = parser.add_subparsers(dest="what", required=True)
  for what, fields in FIELDS.items():
    command = commands.add_parser(what)
    command.add_argument("--rounds", type=int, default=5)
    for name, value in fields.items():
      command.add_argument(f"--{name}", type=int, default=value)
  commands.add_parser("serve")
  options = vars(parser.parse_args())

  # Answers are all that standard output carries: whatever a library prints goes to standard error.
  answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  transformers.logging.set_verbosity_error()
  peer = Peer(options.pop("threads"))
  if options["what"] == "serve":
    serve(peer, answers)
    return
  rounds = options.pop("rounds")
  measured = [peer.measure(options) for _ in range(max(rounds, 1))]
  medians = {
    name: statistics.median(m[name] for m in measured)
    for name in measured[0]
    if name not in options
  }
  rate = options["batch"] * options.get("tokens", 1) / medians["seconds"]
  result = {**options, "rounds": len(measured), **medians, "tokens_per_s": rate}
  print(json.dumps(result | peer.facts()), file=answers)


if __name__ == "__main__":
  main()
