"""What the assembly of a GPU kernel says about it, and what its assembler says."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
import subprocess
from collections.abc import Iterator

_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")
_WRITES = ("st", "red", "atom", "multimem", "cp")
_NOT_GLOBAL = {"shared", "shared::cta", "shared::cluster", "local", "param"}
# These calls come before a trap and write nothing that a caller sees.
_COMPLAINTS = {"__assertfail", "vprintf"}


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One entry of a PTX text.

  Attributes:
    writes: it has an instruction that changes global memory.
    traps: it has one that stops the program.
  """

  name: str
  writes: bool
  traps: bool

  @property
  def stub(self) -> str:
    """Why this cannot be the kernel that was written; empty: it can.

    A compiler that finds a kernel to be undefined, or cannot translate it, may leave an entry that
    only traps or only returns, and report success.
    """
    if self.writes:
      return ""
    return f"kernel '{self.name}' {'only traps' if self.traps else 'writes nothing'}"


def kernels(text: str) -> list[Kernel]:
  """The entries of a PTX text."""
  text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
  found = []
  for entry in _ENTRY.finditer(text):
    opcodes = list(_opcodes(_body(text, entry.end())))
    found.append(Kernel(entry.group(1), any(map(_writes, opcodes)), "trap" in opcodes))
  return found


def _body(text: str, start: int) -> str:
  begin = text.index("{", start)
  depth = 0
  for brace in re.finditer(r"[{}]", text[begin:]):
    depth += 1 if brace.group() == "{" else -1
    if not depth:
      return text[begin : begin + brace.end()]
  raise ValueError("an entry of the PTX does not end")


def _opcodes(body: str) -> Iterator[str]:
  """First word of every instruction; a call's with its target."""
  for statement in re.split(r"[;{}]", body):
    words = re.sub(r"^(\s*[\w$]+:|\s*@!?%\w+|\s*\.loc\s[^\n]*\n)*", "", statement).split()
    if words and words[0].startswith("call"):
      yield "call " + " ".join(words[1:])
    elif words:
      yield words[0]


def _writes(opcode: str) -> bool:
  if opcode.startswith("call "):
    return not any(name in opcode for name in _COMPLAINTS)
  kind, *rest = opcode.split(".")
  if kind not in _WRITES:
    return False
  if kind == "cp":  # asynchronous copies: destination before source
    spaces = [part for part in rest if part == "global" or part in _NOT_GLOBAL]
    return spaces[:1] == ["global"]
  return not _NOT_GLOBAL & set(rest)


@dataclasses.dataclass(frozen=True)
class Assembled:
  """What a kernel takes when it runs.

  Attributes:
    registers: of one thread.
    spilled: bytes that a thread keeps in memory for want of registers.
    shared: bytes of shared memory whose size the assembly fixes.
  """

  registers: int
  spilled: int
  shared: int


class AssemblyError(RuntimeError):
  """The assembler refuses a text."""


def assemble(text: str, arch: str) -> dict[str, Assembled]:
  """Assembles a PTX text, by entry.

  Raises:
    AssemblyError: with the assembler's first complaint.
  """
  done = subprocess.run(
    [_assembler(), "-v", f"-arch={arch}", "-o", "/dev/null", "/dev/stdin"],
    input=text,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    lines = [line for line in done.stderr.splitlines() if "error" in line or "fatal" in line]
    raise AssemblyError(f"ptxas: {(lines or [f'exit status {done.returncode}'])[0]}")
  return parse_report(done.stderr)


def parse_report(report: str) -> dict[str, Assembled]:
  """The lines that `ptxas -v` writes, by entry."""
  found = {}
  for part in report.split("Compiling entry function '")[1:]:
    number = functools.partial(_number, part)
    found[part.partition("'")[0]] = Assembled(
      registers=number(r"Used (\d+) registers"),
      spilled=number(r"(\d+) bytes spill stores"),
      shared=number(r"(\d+) bytes smem"),
    )
  return found


def _number(text: str, pattern: str) -> int:
  match = re.search(pattern, text)
  return int(match.group(1)) if match else 0


@functools.cache
def _assembler() -> str:
  spec = importlib.util.find_spec("nvidia.cuda_nvcc")
  if spec is None:
    raise AssemblyError("no ptxas: run scripts/aot/setup.sh and use .venv-aot/bin/python")
  return str(pathlib.Path(next(iter(spec.submodule_search_locations))) / "bin" / "ptxas")
