"""The class that runs a peer: against a fake one, so that neither torch nor its venv is needed."""

import pkgutil
import sys
import time

import pytest

from hysparse import benchmarks
from hysparse.benchmarks.peer import SCRIPT, SETUP, Peer, PeerError

# Long enough for a Python process to start on a busy machine.
PATIENT_S = 60.0
# Of a peer that never answers: as short as the test should be.
IMPATIENT_S = 0.5

# Answers each request with itself; "what" may also name a misbehaviour.
FAKE = """
import json, os, sys, time
assert sys.argv[1:] == ["serve"]
print(json.dumps({"parameters": 7}), flush=True)
print("chatter", file=sys.stderr)
for line in sys.stdin:
  request = json.loads(line)
  match request["what"]:
    case "die":
      sys.exit("out of memory")
    case "hang":
      time.sleep(600)
    case "stammer":
      print("half a li", flush=True)
    case "refuse":
      print(json.dumps({"error": "batch: is 0"}), flush=True)
    case _:
      print(json.dumps({**request, "seconds": 0.25}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
  """Makes a `Peer` whose process runs a script of the test."""

  def make(script=FAKE, timeout_s=PATIENT_S):
    path = tmp_path / "peer.py"
    path.write_text(script, encoding="utf-8")
    return Peer(sys.executable, path, timeout_s)

  return make


def test_answers_belong_to_their_requests(fake):
  with fake() as peer:
    assert peer.facts == {"parameters": 7}
    for context in (1024, 4096):
      answer = peer.measure("decode", context=context, batch=8)
      assert answer == {"what": "decode", "context": context, "batch": 8, "seconds": 0.25}
  assert peer._process.returncode == 0  # by the end of its input, not by force


def test_an_error_is_raised_and_the_peer_goes_on(fake):
  with fake() as peer:
    with pytest.raises(PeerError, match=r"^peer: refuse: batch: is 0$"):
      peer.measure("refuse", batch=0)
    with pytest.raises(PeerError, match=r"^peer: stammer: the answer is no JSON .*'half a li'$"):
      peer.measure("stammer")
    assert peer.measure("prefill")["seconds"] == 0.25


def test_missing_environment_names_the_command(tmp_path):
  with (
    pytest.raises(PeerError, match=f"^peer: no .*/bin/python; .*: {SETUP}$"),
    Peer(tmp_path / "bin" / "python"),
  ):
    pass
  assert (SCRIPT.parents[2] / SETUP.split()[1]).is_file()


def test_a_process_that_ends_is_reported_with_its_last_words(fake):
  with fake() as peer:
    with pytest.raises(PeerError, match=r"^peer: die: the process ended with 1: out of memory$"):
      peer.measure("die")
    with pytest.raises(PeerError, match=r"^peer: decode: the process ended with 1: "):
      peer.measure("decode")


def test_a_process_that_does_not_come_up(fake):
  with (
    pytest.raises(PeerError, match=r"^peer: start: the process ended with 1: ModuleNotFoundError"),
    fake("import no_such_module"),
  ):
    pass


def test_no_answer_in_time_ends_the_process(fake):
  start = time.monotonic()
  with fake() as peer:
    peer._timeout_s = IMPATIENT_S
    with pytest.raises(PeerError, match=r"^peer: hang: no answer within 0.5 s$"):
      peer.measure("hang")
    with pytest.raises(PeerError, match=r"^peer: decode: the process ended with -9"):
      peer.measure("decode")
  assert peer._process.returncode == -9
  assert time.monotonic() - start < PATIENT_S


def test_a_silent_start_ends_too(fake):
  with (
    pytest.raises(PeerError, match=r"^peer: start: no answer within 0.5 s$"),
    fake("import time; time.sleep(600)", IMPATIENT_S) as _,
  ):
    pass


def test_every_tool_exists():
  """`scripts/bench.py` offers all modules but these; a renamed one would be taken for one."""
  assert set(benchmarks.TOOLS) < {m.name for m in pkgutil.iter_modules(benchmarks.__path__)}
