"""A peer that is measured beside us: another framework, in a process and an environment of its own.

The process waits on its standard input and works only when asked, so that a benchmark can alternate
its own rounds with the peer's. Each request and each answer is one line of JSON; the first answer,
unasked, tells what the peer is. scripts/bench_peers/ holds the peers.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
SCRIPT = _ROOT / "scripts" / "bench_peers" / "deepseek_v4.py"
SETUP = "bash scripts/bench_peers/setup.sh"

_GOODBYE_S = 5.0  # for the process to end once its input has


class PeerError(RuntimeError):
  """A peer that is not installed, ends, answers with an error or does not answer; one line."""


class Peer:
  """The peer's process, from `with` to its end.

      with Peer() as peer:
        seconds = peer.measure("decode", context=1024, batch=1, steps=32)["seconds"]

  Attributes:
    facts: what the peer says of itself: parameters, threads, versions.
  """

  facts: dict[str, Any]

  def __init__(
    self,
    python: str | pathlib.Path = PYTHON,
    script: str | pathlib.Path = SCRIPT,
    timeout_s: float = 300.0,
  ):
    """Describes the process; `with` starts it.

    Args:
      python: the interpreter, that of the environment which setup.sh makes.
      script: takes the argument `serve`.
      timeout_s: seconds that starting and each answer may take.
    """
    self._command = [str(python), str(script), "serve"]
    self._timeout_s = timeout_s

  def __enter__(self) -> Peer:
    """Starts the process and waits until it is ready.

    Raises:
      PeerError: no such environment, or the process does not come up.
    """
    python = pathlib.Path(self._command[0])
    if not python.is_file():
      raise PeerError(f"peer: no {python}; make its environment with: {SETUP}")
    self._errors = tempfile.TemporaryFile()  # a file never fills up, as a pipe nobody reads does
    self._process = subprocess.Popen(
      self._command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      encoding="utf-8",
    )
    # Reading a pipe cannot be given a time limit; taking from a queue can.
    self._lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True)
    reader.start()
    try:
      self.facts = self._answer("start")
    except BaseException:
      self._end()
      raise
    return self

  def __exit__(self, *error: object) -> None:
    self._end()

  def measure(self, what: str, **fields: int) -> dict[str, Any]:
    """One measurement, now: the request's fields and what was measured (`seconds`).

    Raises:
      PeerError: the peer refuses, ends, or does not answer in time (it is ended then).
    """
    with contextlib.suppress(OSError):  # it has ended: the answer tells
      self._process.stdin.write(json.dumps({"what": what, **fields}) + "\n")
      self._process.stdin.flush()
    return self._answer(what)

  def _answer(self, request: str) -> dict[str, Any]:
    try:
      line = self._lines.get(timeout=self._timeout_s)
    except queue.Empty:
      self._process.kill()
      self._lines = queue.Queue()  # an answer that comes too late is none to the next request
      self._lines.put(None)
      raise PeerError(f"peer: {request}: no answer within {self._timeout_s:g} s") from None
    if line is None:
      self._lines.put(None)  # for the next request
      code = self._process.wait()
      raise PeerError(f"peer: {request}: the process ended with {code}: {self._last_error()}")
    try:
      answer = json.loads(line)
    except json.JSONDecodeError:
      answer = None
    if not isinstance(answer, dict):
      raise PeerError(f"peer: {request}: the answer is no JSON object: {line.strip()[:200]!r}")
    if "error" in answer:
      raise PeerError(f"peer: {request}: {answer['error']}")
    return answer

  def _last_error(self) -> str:
    self._errors.seek(0)
    lines = self._errors.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")

  def _end(self) -> None:
    """Ends the process: by the end of its input, or else by force."""
    with contextlib.suppress(OSError):  # a request that was never read
      self._process.stdin.close()
    try:
      self._process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._errors.close()


def _read(stdout: Iterable[str], lines: queue.Queue[str | None]) -> None:
  for line in stdout:
    lines.put(line)
  lines.put(None)
