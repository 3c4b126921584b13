"""Runs workers, reads what they say, and tells what has failed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hysparse_kernels.catalogue import Operation
from hysparse_kernels.dispatch import RUNS_ON

WORKER = (sys.executable, "-m", "hysparse_kernels.aot.worker")
_TELLING = re.compile(r"check failed|llvm error|fatal|assert|\berror:", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Job:
  """What one worker compiles; the cases are "operation/spec"."""

  target: str
  backend: str
  cases: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of one compilation.

  Attributes:
    failure: why it failed; empty: it did not.
    seconds: of processor time that it took.
    report: sizes by name, see `compiled.Report`.
  """

  target: str
  op: str
  backend: str
  spec: str
  failure: str = ""
  seconds: float = 0.0
  report: Mapping[str, int] = dataclasses.field(default_factory=dict)


def jobs(
  operations: Mapping[str, Operation],
  platforms: Mapping[str, str],
  backends: Sequence[str],
  specs: Callable[[Operation, str, str], Iterable[str]],
) -> Iterator[Job]:
  """Every operation, chip and backend that go together.

  Args:
    platforms: of the chips, by name.
    backends: which ones.
    specs: names of those for an operation, its backend and a platform.
  """
  for target, platform in platforms.items():
    for backend in backends:
      if RUNS_ON.get(backend, platform) != platform:
        continue
      cases = [
        f"{name}/{spec}"
        for name, op in operations.items()
        if backend in op.backends
        for spec in specs(op, backend, platform)
      ]
      if cases:
        yield Job(target, backend, tuple(cases))


def run(
  all_jobs: Iterable[Job], seconds: float, workers: int, command: Sequence[str] = WORKER
) -> Iterator[Outcome]:
  """Outcomes, as they come.

  Args:
    seconds: limit for one case.
    workers: jobs at a time.
    command: what is run with a job's chip, backend and cases as arguments.
  """
  found: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    running = [pool.submit(_run, job, seconds, command, found.put) for job in all_jobs]
    for _ in running:
      while outcome := found.get():
        yield outcome
    for done in running:
      done.result()  # raises what went wrong here


def _run(
  job: Job, seconds: float, command: Sequence[str], tell: Callable[[Outcome | None], None]
) -> None:
  """One job: a worker, and another one for what a case that ended the first one left over.

  Args:
    tell: hears every outcome, then None.
  """
  left, trying = list(job.cases), ""

  def hear(line: dict) -> None:
    nonlocal trying
    trying = line["case"]
    if len(line) > 1:
      tell(_outcome(job, **line))
      left.remove(trying)
      trying = ""

  try:
    while left:
      ending = _process([*command, job.target, job.backend, *left], seconds, hear)
      # If it was not trying any, nothing can be compiled at all.
      for case in [trying] if trying else list(left):
        hear({"case": case, "failure": ending})
  finally:
    tell(None)


def _outcome(
  job: Job, case: str, failure: str = "", seconds: float = 0.0, **report: int
) -> Outcome:
  op, _, spec = case.partition("/")
  return Outcome(job.target, op, job.backend, spec, failure, seconds, report)


def _process(words: Sequence[str], seconds: float, hear: Callable[[dict], None]) -> str:
  """Runs a worker and returns how it ended.

  Args:
    seconds: without a line, after which it is ended.
    hear: is told its lines.
  """
  with tempfile.TemporaryFile("w+", errors="replace") as errors:
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
    late = threading.Event()

    def end():
      late.set()
      worker.kill()

    while True:
      watch = threading.Timer(seconds, end)
      watch.start()
      line = worker.stdout.readline()
      watch.cancel()
      if not line.endswith("\n"):  # nothing more, or a line that was cut
        break
      hear(json.loads(line))
    code = worker.wait()
    errors.seek(0)
    return f"not compiled after {seconds:.0f} seconds" if late.is_set() else _ending(code, errors)


def _ending(code: int, errors: Iterable[str]) -> str:
  how = f"ended with status {code}"
  if code < 0:
    how = f"was ended by {signal.Signals(-code).name}"
  lines = [line.strip() for line in errors if line.strip()]
  why = next(filter(_TELLING.search, lines), lines[-1] if lines else "no message")
  return f"the compiler's process {how}: {why[:300]}"


def line(outcome: Outcome) -> str:
  """One outcome in words."""
  where = f"{outcome.target:6} {outcome.backend:10} {outcome.op + '/' + outcome.spec:47}"
  if outcome.failure:
    return f"FAIL   {where} {outcome.failure}"
  return f"ok     {where} {outcome.seconds:5.1f} s  {_figures(outcome.report)}"


def _figures(report: Mapping[str, int]) -> str:
  words = [f"{name} {_size(report[name])}" for name in ("arguments", "outputs", "temporaries")]
  words += [f"{name} {_size(report[name])}" for name in ("vmem", "shared") if report[name]]
  words += [f"{name} {report[name]}" for name in ("registers", "spilled") if report[name]]
  return ", ".join(words)


def _size(count: int) -> str:
  for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
    if count >= 1024**power:
      return f"{count / 1024**power:.1f} {unit}"
  return f"{count} B"


def judge(outcomes: Iterable[Outcome], expected: Mapping[str, str]) -> Iterator[Outcome]:
  """The outcomes of canaries turned round: one that passes, or fails of something else, fails."""
  for outcome in outcomes:
    if outcome.op not in expected:
      yield outcome
    elif expected[outcome.op] not in outcome.failure:
      said = outcome.failure or "it compiled"
      failure = f"the check does not see a kernel that cannot run: {said}"
      yield dataclasses.replace(outcome, failure=failure)
