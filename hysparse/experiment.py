"""One experiment from config to result: what scripts/train.py calls.

    workdir = pathlib.Path("runs/tiny")
    result = experiment.run(config, workdir)  # None if a signal ended it early
    print(result.text(workdir))

Here the rooms meet that may not know each other: data, model, loop, evaluation and inference. A
workdir with checkpoints is gone on with; a finished one only tells its result.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from hysparse import checkpoints as checkpoints_lib
from hysparse import json_text
from hysparse import tokenizer as tokenizer_lib
from hysparse import workdir as workdir_lib
from hysparse.checkpoints import CheckpointError, Checkpoints
from hysparse.config import Config, ConfigError
from hysparse.evaluation import heldout, ngram, recall
from hysparse.inference.generate import generate
from hysparse.inference.requests import Request
from hysparse.inference.sampling import Sampling
from hysparse.nn import model as model_lib
from hysparse.tokenizer import Tokenizer, TokenizerError, engram_token_map
from hysparse.training import metrics, plot
from hysparse.training import optimizer as optimizer_lib
from hysparse.training.data.documents import DataError
from hysparse.training.data.pipeline import Data, load_data
from hysparse.training.loop import Callbacks, Loop, NonFiniteError
from hysparse.training.losses import loss_fn
from hysparse.training.progress import Console
from hysparse.training.state import Trainer, TrainState
from hysparse.workdir import WorkdirError

# What goes wrong by input, data or disk: one line for the user, no traceback.
USER_ERRORS = (
  ConfigError,
  WorkdirError,
  CheckpointError,
  DataError,
  TokenizerError,
  NonFiniteError,
)

# The n-gram baselines are fitted on at most this much training text, whatever the corpus.
_BASELINE_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished experiment has to tell; `result.json` holds the same.

  Attributes:
    step: updates applied.
    parameters: trained values.
    heldout: the last evaluation, by name (evaluation/heldout.py).
    baselines: bits per byte of n-gram models over the same held-out tokens, by name.
    recall: of each index source, beside a random selection's (evaluation/recall.py).
    tokens_per_s: median over the log records.
    sample: "prompt" and what the model made of it, "text"; None when none was asked for.
    plot: the file of the loss curve, in the workdir.
  """

  step: int
  parameters: int
  heldout: Mapping[str, float]
  baselines: Mapping[str, float]
  recall: Mapping[str, Mapping[str, float]]
  tokens_per_s: float
  sample: Mapping[str, str] | None
  plot: str

  def text(self, workdir: pathlib.Path) -> str:
    """The result for a person."""
    lines = [
      f"{self.step} steps, {self.parameters:,} parameters, {self.tokens_per_s:,.0f} tokens/s"
    ]
    others = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
    lines.append(f"held-out bits per byte: {self.heldout['bits_per_byte']:.3f} ({others})")
    for layer, found in self.recall.items():
      lines.append(
        f"indexer recall, layer {layer}: {found['recall']:.3f}"
        f" (a random selection: {found['random']:.3f})"
      )
    lines.append(f"loss curve: {workdir / self.plot}")
    if self.sample:
      lines += ["sample:", self.sample["prompt"] + self.sample["text"]]
    return "\n".join(lines)


def run(config: Config, workdir: pathlib.Path) -> Result | None:
  """Trains `config` in `workdir`, from its newest checkpoint if there is one.

  Returns:
    The result, or None if a signal ended it early (the same call goes on).

  Raises:
    ConfigError, WorkdirError, DataError, TokenizerError: before anything is computed.
    NonFiniteError, CheckpointError, WorkdirError: on the way.
  """
  try:
    with workdir_lib.locked(workdir):
      return _locked_run(config, workdir)
  except OSError as error:  # mostly a full disk
    raise WorkdirError(f"workdir {workdir}: {error}") from error


def _locked_run(config: Config, workdir: pathlib.Path) -> Result | None:
  record = workdir_lib.read_experiment(workdir)
  if record is not None and workdir_lib.CONVERTED in record:
    raise WorkdirError(f"workdir {workdir}: holds a converted model; training takes a new workdir")
  console = Console()
  done = max(checkpoints_lib.steps_in(workdir), default=0)
  if record is not None and not done:
    record = None  # nothing was trained with it yet, so it binds nothing
    (workdir / tokenizer_lib.FILE_NAME).unlink(missing_ok=True)
  if record is not None:
    workdir_lib.check_same(workdir, record, config)
    if done > config.train.steps:
      raise ConfigError(
        f"train.steps: is {config.train.steps}; {workdir} has a checkpoint of step {done} already"
      )
    if result := _finished(config, workdir, record):
      console.say(f"{workdir} has finished its {result.step} steps; train.steps can be raised")
      console.say(result.text(workdir))
      return result
  return _Run(config, workdir, console, record).run()


def _finished(config: Config, workdir: pathlib.Path, record: Mapping[str, Any]) -> Result | None:
  """The stored result, if it is of all steps and of these evaluation settings."""
  path = workdir / workdir_lib.RESULT
  if not path.exists() or record["config"].get("eval") != config.to_dict()["eval"]:
    return None
  try:
    result = Result(**json_text.parse(path.read_bytes()))
  except (ValueError, TypeError) as error:
    raise WorkdirError(f"{path}: cannot be read: {error}") from None
  return result if result.step == config.train.steps else None


class _Run:
  """The parts of one run, made in the order in which they can fail cheaply."""

  def __init__(
    self,
    config: Config,
    workdir: pathlib.Path,
    console: Console,
    record: Mapping[str, Any] | None,
  ):
    self.config, self.workdir, self.console = config, workdir, console
    model = config.model
    self.data: Data = load_data(
      config.data, model.alignment, prompt_split=model.prompt_experts < model.experts_per_token
    )
    self.tokenizer: Tokenizer = self.data.tokenizer
    self.prompt = self._check_tokens()
    self.graphdef, self.abstract = model_lib.abstract(config)
    self.trainer = Trainer(config, self.graphdef, self.abstract, loss_fn)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self.like: TrainState = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
      jax.eval_shape(self.trainer.init, self.abstract),
    )
    self._check_disk()
    self._tell(record)

  def run(self) -> Result | None:
    checkpoints = Checkpoints(self.workdir, self.config.train.keep_checkpoints, self.console.say)
    try:
      state = self._start(checkpoints)
      (self.workdir / workdir_lib.RESULT).unlink(missing_ok=True)
      self.tokenizer.save(self.workdir)
      workdir_lib.write_experiment(self.workdir, self.config)
      records = metrics.Metrics(self.workdir, int(state.step))
      try:
        loop = Loop(
          self.trainer, state, self.data.train, self.workdir, records, checkpoints, self.console,
          Callbacks(self.evaluate, self.finish),
        )  # fmt: skip
        done = loop.run()
      finally:
        self.console.close()
        records.close()
        self.data.train.close()
    finally:
      checkpoints.close()
    return self.result if done else None

  # --- Callbacks of the loop ---------------------------------------------------------------------

  def evaluate(self, state: TrainState) -> dict[str, float]:
    """Held-out bits, and each index source's recall beside a random selection's."""
    self._bits = heldout.bits_per_byte(
      self.graphdef,
      self.trainer.model_state(state),
      self.heldout_batches,
      self.tokenizer.byte_lengths,
      loss_block=self.config.train.loss_block,
    )
    self._recalls = self._recall(state)
    values = dict(self._bits)
    for layer, found in self._recalls.items():
      values[f"recall_layer_{layer}"] = found["recall"]
      values[f"random_recall_layer_{layer}"] = found["random"]
    told = f"held out: {self._bits['bits_per_byte']:.3f} bits per byte"
    if self._recalls:
      each = " ".join(f"{found['recall']:.2f}" for found in self._recalls.values())
      told += f", indexer recall {each}"
    self.console.say(f"step {int(state.step)}/{self.config.train.steps}  {told}")
    return values

  def finish(self, state: TrainState) -> None:
    """Sample, plot and summary. The loop has just evaluated this state."""
    records = list(metrics.read(self.workdir))
    baselines = self._baselines()
    plot.save_loss_plot(self.workdir / workdir_lib.PLOT, records, baselines)
    self.result = Result(
      step=int(state.step),
      parameters=sum(x.size for x in state.params.values()),
      heldout=self._bits,
      baselines=baselines,
      recall={str(layer): found for layer, found in self._recalls.items()},
      tokens_per_s=float(np.median([r["tokens_per_s"] for r in records if "tokens_per_s" in r])),
      sample=self._sample(state),
      plot=workdir_lib.PLOT,
    )
    workdir_lib.write_json(self.workdir / workdir_lib.RESULT, dataclasses.asdict(self.result))
    self.console.say("")
    self.console.say(self.result.text(self.workdir))

  @functools.cached_property
  def heldout_batches(self) -> list[dict[str, np.ndarray]]:
    return self.data.heldout(self.config.eval.batches)

  def _recall(self, state: TrainState) -> dict[int, dict[str, float]]:
    batches = self.heldout_batches[: self.config.eval.recall_batches]
    if not batches or not self.config.model.layers.index_sources:
      return {}
    found = recall.indexer_recall(
      self.graphdef, self.trainer.model_state(state), batches, self.config.model
    )
    return {layer: one for layer, one in found.items() if one["queries"]}

  def _baselines(self) -> dict[str, float]:
    bigram = ngram.fit(self._some_documents(), self.tokenizer.vocab_size)
    lengths = self.tokenizer.byte_lengths
    return {
      name: ngram.evaluate(model, self.heldout_batches, lengths).bits_per_byte
      for name, model in (("unigram", bigram.unigram), ("bigram", bigram))
    }

  def _some_documents(self) -> Iterator[np.ndarray]:
    tokens = 0
    for document in self.data.train_documents():
      yield document
      tokens += len(document)
      if tokens >= _BASELINE_TOKENS:
        return

  def _sample(self, state: TrainState) -> dict[str, str] | None:
    wanted = self.config.eval
    if not wanted.sample_tokens:
      return None
    room = self.config.model.max_positions
    new = min(wanted.sample_tokens, room - 1)
    prompt = self.prompt[-(room - new) :]
    sampling = Sampling(wanted.temperature, seed=self.config.train.seed)
    request = Request(prompt, new, sampling, stops=(self.tokenizer.eos_id,))
    model_state = self.trainer.model_state(state)
    (finished,) = generate(self.graphdef, model_state, self.config, [request])
    return {"prompt": wanted.sample_prompt, "text": self.tokenizer.decode(finished.tokens)}

  # --- Before the first step ---------------------------------------------------------------------

  def _check_tokens(self) -> np.ndarray:
    """The sample's prompt in tokens.

    Raises:
      ConfigError: the tokenizer does not fit the model, or the prompt has no token.
      WorkdirError: the workdir was trained with another tokenizer.
    """
    stored = self.workdir / tokenizer_lib.FILE_NAME
    if stored.exists() and tokenizer_lib.load(stored).fingerprint != self.tokenizer.fingerprint:
      raise WorkdirError(
        f"{stored}: is not the tokenizer that {self.config.data.tokenizer!r} gives on"
        f" {self.config.data.source!r} now; the data has changed since this workdir was started"
      )
    rows, ids = self.config.model.vocab_size, self.tokenizer.vocab_size
    if ids > rows:
      raise ConfigError(
        f"model.vocab_size: is {rows}; the tokenizer {self.config.data.tokenizer!r} has {ids} ids"
      )
    prompt = self.tokenizer.encode(self.config.eval.sample_prompt)
    if self.config.eval.sample_tokens and not len(prompt):
      raise ConfigError(
        f"eval.sample_prompt: is {self.config.eval.sample_prompt!r}; must hold at least one token"
        " (or eval.sample_tokens=0)"
      )
    return prompt

  def _check_disk(self) -> None:
    """
    Raises:
      WorkdirError: no room for the checkpoints, were they stored without compression.
    """
    each = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.like))
    free = shutil.disk_usage(self.workdir).free
    if free < each:
      raise WorkdirError(
        f"workdir {self.workdir}: a checkpoint takes up to {each / 1e6:,.1f} MB,"
        f" {free / 1e6:,.1f} MB are free"
      )

  def _tell(self, record: Mapping[str, Any] | None) -> None:
    say, config = self.console.say, self.config
    devices = jax.devices()
    say(f"devices: {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    say(f"layers: {config.model.schedule}")
    say(optimizer_lib.describe(config.optim, self.like.params))
    say(f"data: {self.data.describe}")
    tokens = config.data.batch_size * config.data.seq_len
    say(f"training: {config.train.steps} steps of {tokens:,} tokens")
    if record is not None:
      now = workdir_lib.versions()
      differ = [
        f"{name} {old} -> {now.get(name)}"
        for name, old in record["versions"].items()
        if now.get(name) != old
      ]
      if differ:
        say(f"going on with other versions, so not to the bit: {', '.join(differ)}")

  def _start(self, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint's state with the data behind it, or a new one."""
    restored = checkpoints.restore(self.like)
    if restored is None:
      _, state = model_lib.create(self.config, self.config.train.seed, self._token_map())
      return self.trainer.init(state)
    self.data.train.set_state(restored.position)
    self.console.say(f"going on from checkpoint {restored.step}")
    return restored.state

  def _token_map(self) -> np.ndarray | None:
    """Engram's id map; ids that the tokenizer does not have are never met."""
    model = self.config.model
    if not model.engram_layers:
      return None
    found = engram_token_map(self.tokenizer)
    return np.pad(found, (0, model.vocab_size - len(found)))
