"""scripts/generate.py: texts and ids in, texts and ids out, an error in one line."""

import io
import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import serving
import small

import hysparse
from hysparse import checkpoint_arrays, checkpoints, generation, workdir
from hysparse.checkpoint_arrays import Later
from hysparse.generation import PromptError
from hysparse.nn.batch import Batch
from hysparse.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow  # every call of the script compiles a model of its own

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "generate.py"
GOLDEN = ROOT / "tests" / "golden" / "tiny-text"
# Neither drafts nor an encoder|decoder bar.
CFG = small.config("swa", residual="plain", vocab_size=ByteTokenizer().vocab_size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
  """A workdir with a tokenizer."""
  path = tmp_path_factory.mktemp("trained")
  workdir.write_experiment(path, CFG)
  named = checkpoints.named(small.model(CFG)[1])
  arrays = {
    name: Later(x.shape, np.dtype(x.dtype), lambda x=x: np.asarray(x)) for name, x in named.items()
  }
  checkpoint_arrays.write(path, 1, arrays)
  ByteTokenizer().save(path)
  return path


# --- All command lines, in one process: most of each is imports ----------------------------------

_CASES = """
import contextlib, importlib.util, io, json, sys
from absl import flags
from hysparse import command_line
spec = importlib.util.spec_from_file_location("generate", sys.argv[1])
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
own = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(generate)]
outcomes = {}
for name, argv in json.loads(sys.argv[2]).items():
  flags.FLAGS.unparse_flags()
  for flag in own:
    flags.FLAGS[flag].unparse()
  out, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out):
    try:
      generate.main(command_line.parse(["generate.py", *argv]))
      code = 0
    except SystemExit as stop:
      code = stop.code
  outcomes[name] = (code, out.getvalue(), errors.getvalue())
print(json.dumps(outcomes))
"""

# name -> what its error says
ERRORS = {
  "no model": "--model: missing",
  "no prompt": "prompts: there are none; give --prompt, --ids or --file",
  "no such model": "nowhere: is no folder",
  "no model's folder": "holds neither experiment.json",
  "stray word": "stray: not understood",
  "unknown flag": "Unknown command line flag 'promt'",
  "no ids": "--ids=1,x: must be token ids",
  "empty ids": "request 0: prompt: has shape (0,)",
  "ids beyond the vocabulary": "request 1: prompt: token 259 is not in 0..vocab_size-1 (258)",
  "text without a tokenizer": "request 0: is text, and the model's folder has no tokenizer.json",
  "temperature": "sampling.temperature: -1.0; must be",
  "top_p": "sampling.top_p: nan; must be",
  "seed": "sampling.seed: -1; must be",
  "max_new": "max_new",
  "longer than the model": "its 1 tokens and 200 new ones (max_new) are more than the 128",
  "replay": "prefill: 'replay' cannot be used: the schedule has no encoder|decoder bar",
  "drafts": "speculate: the model has no draft layers",
  "room": "request 0: 201 tokens need 2 blocks of 128 tokens; the pool has 1",
  "no such file": "nothing.txt: cannot be read",
  "line of a file": "prompts.jsonl:2: is no JSON",
  "place of the results": "there is no folder",
}


@pytest.fixture(scope="module")
def outcomes(trained, tmp_path_factory) -> dict[str, tuple]:
  folder = tmp_path_factory.mktemp("prompts")
  (folder / "prompts.jsonl").write_text('{"prompt": [1]}\n{"prompt"\n')
  (folder / "good.jsonl").write_text('{"prompt": "in range"}\n{"prompt": [5, 6]}\n')
  model, golden = f"--model={trained}", f"--model={GOLDEN}"
  drawn = [model, "--max_new=12", "--temperature=2", "--nostop"]
  cases = {
    "no model": ["--ids=1"],
    "no prompt": [model],
    "no such model": [f"--model={folder / 'nowhere'}", "--ids=1"],
    "no model's folder": [f"--model={folder}", "--ids=1"],
    "stray word": [model, "--ids=1", "stray"],
    "unknown flag": [model, "--promt=1"],
    "no ids": [model, "--ids=1,x"],
    "empty ids": [model, "--ids="],
    "ids beyond the vocabulary": [model, "--ids=1", "--ids=258,259"],
    "text without a tokenizer": [golden, "--prompt=a"],
    "temperature": [model, "--ids=1", "--temperature=-1"],
    "top_p": [model, "--ids=1", "--top_p=nan"],
    "seed": [model, "--ids=1", "--seed=-1"],
    "max_new": [model, "--ids=1", "--max_new=0"],
    "longer than the model": [golden, "--ids=1", "--max_new=200"],
    "replay": [model, "--ids=1", "--prefill=replay"],
    "drafts": [model, "--ids=1", "--speculate"],
    "room": [model, "--ids=1", "--pool_tokens=128"],
    "no such file": [model, f"--file={folder / 'nothing.txt'}"],
    "line of a file": [model, f"--file={folder / 'prompts.jsonl'}"],
    "place of the results": [model, "--ids=1", f"--json={folder / 'nowhere' / 'x.json'}"],
    "two texts": [*drawn, "--prompt=def", "--prompt=in range", "--seed=5"],
    "to a file": [
      *drawn, f"--file={folder / 'good.jsonl'}", f"--json={folder / 'out.json'}", "--seed=6",
    ],
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-c", _CASES, str(SCRIPT), json.dumps(cases)],
    capture_output=True,
    text=True,
    check=True,
  )
  outcomes = json.loads(done.stdout.splitlines()[-1])
  return outcomes | {"written": json.loads((folder / "out.json").read_text())}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line_and_status_2(outcomes, case):
  code, out, errors = outcomes[case]
  assert code == 2, errors
  *progress, error = errors.splitlines()
  assert error.startswith("error: ") and ERRORS[case] in error and not out
  assert all(line.startswith(("loading ", "compiling: ")) for line in progress)


def test_several_prompts_give_a_json_line_each(outcomes):
  code, out, errors = outcomes["two texts"]
  assert code == 0 and "24 tokens" in errors.splitlines()[-1]
  lines = [json.loads(line) for line in out.splitlines()]
  for line in lines:
    assert line.keys() == {"tokens", "reason", "text"} and line["reason"] == "length"
    assert len(line["tokens"]) == 12 and line["text"] == ByteTokenizer().decode(line["tokens"])
  code, out, _ = outcomes["to a file"]
  assert code == 0 and not out
  # Prompt i is drawn with seed + i, whatever the others are.
  assert lines[1] == outcomes["written"][0] != lines[0]
  assert len(outcomes["written"]) == 2


# --- The script ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_continues_token_ids():
  ids = [5, 17, 23]
  command = [sys.executable, str(SCRIPT), f"--model={GOLDEN}", "--ids=5,17,23", "--max_new=4"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  tokens = [int(word) for word in done.stdout.split()]
  assert len(tokens) == 4 and "4 tokens in" in done.stderr
  loaded = hysparse.load(GOLDEN)
  batch = Batch.of(np.asarray([ids + tokens], np.int32))
  output = small.compiled(loaded.graphdef, loaded.state, batch, all_positions=True)
  least, most = np.sort(output.logits_BxNxV[0, 2:-1])[:, -2:].T
  assert (most - least).min() > serving.MARGIN
  assert output.logits_BxNxV[0, 2:-1].argmax(-1).tolist() == tokens


# --- Files of prompts ----------------------------------------------------------------------------


def test_prompts_of_files(tmp_path):
  text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
  text.write_text("two\nlines é\n", encoding="utf-8")
  assert generation.read_prompts(text) == ["two\nlines é\n"]
  lines.write_text('{"prompt": "é", "more": 1}\n\n  \n{"prompt": [3, 4]}\n', encoding="utf-8")
  assert generation.read_prompts(lines) == ["é", [3, 4]]
  lines.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8")
  assert generation.read_prompts(lines) == ["a\u2028b"]
  lines.write_text("")
  assert generation.read_prompts(lines) == []


@pytest.mark.parametrize(
  "line",
  ['{"prompt"', "[1, 2]", "3", '{"text": "a"}', '{"prompt": 3}', '{"prompt": null}', "[" * 100_000],
  ids=lambda line: line[:12],
)
def test_a_bad_line_is_named(tmp_path, line):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
  with pytest.raises(PromptError, match=r"prompts\.jsonl:3: ") as error:
    generation.read_prompts(path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\xfe")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, make):
  path = tmp_path / "prompts.txt"
  make(path)
  with pytest.raises(PromptError, match=r"prompts\.txt: cannot be read"):
    generation.read_prompts(path)


# --- What a person sees --------------------------------------------------------------------------


def shown(pieces: list[list[int]], tokenizer) -> tuple[list[str], str]:
  """What is on the screen after each piece of one text, and in the end."""
  stream, screens = io.StringIO(), []
  told = generation._Told(tokenizer, stream, 1)
  for piece in pieces:
    told.tokens(0, piece)
    screens.append(stream.getvalue())
  told.close(types.SimpleNamespace(calls=1, decoded=1))
  return screens, stream.getvalue()


def test_a_character_is_shown_when_it_is_whole():
  tokenizer = ByteTokenizer()
  a, *rest, b = tokenizer.encode("a€b").tolist()
  screens, text = shown([[a, rest[0]], [rest[1]], [rest[2]], [b]], tokenizer)
  assert screens == ["a", "a", "a€", "a€b"] and text == "a€b\n"


def test_several_prompts_show_a_line_now_and_then(capsys):
  told = generation._Told(None, None, 3)
  for _ in range(100):
    told.tokens(0, [1, 2])
  told.close(types.SimpleNamespace(calls=50, decoded=100))
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("200 tokens in") and line.endswith("2.00 tokens a call of the model")


def test_ids_are_shown_where_there_is_no_tokenizer():
  screens, text = shown([[5], [17, 3]], None)
  assert screens == [" 5", " 5 17 3"] and text == " 5 17 3\n"
