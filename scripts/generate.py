"""Continues prompts with a trained or a released model.

python scripts/generate.py --model=runs/demo --prompt='def main(' --temperature=0.7
python scripts/generate.py --model=tests/golden/tiny-text --ids=5,17,23 --max_new=20
python scripts/generate.py --model=runs/demo --file=prompts.jsonl --json=answers.json

--model is a workdir or a released folder. One prompt is printed as it comes, several as JSON lines
({"tokens", "reason", "text"}) in their order. Exit status: 0 done, 2 an error of input or disk.
"""

import json
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from hysparse import command_line, generation
from hysparse.inference.sampling import Sampling

_MODEL = flags.DEFINE_string("model", None, "A workdir or a released folder.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A text to continue; may be given repeatedly.")
_IDS = flags.DEFINE_multi_string("ids", [], "The same as token ids: 5,17,23.")
_FILE = flags.DEFINE_multi_string(
  "file", [], 'A text file (one prompt), or JSONL with a field "prompt" (text or ids).'
)
_MAX_NEW = flags.DEFINE_integer(
  "max_new", None, "New tokens, at most; by default 200, or what there is room for.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Share of the likeliest tokens to draw from.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Drops tokens below this share of the likeliest one.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws; prompt i takes seed + i.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences that decode at once.", lower_bound=1)
_POOL = flags.DEFINE_integer("pool_tokens", None, "Tokens that all sequences have room for.")
_PREFILL = flags.DEFINE_enum(
  "prefill", "all_layers", ["all_layers", "replay"],
  "replay runs the decoder on the last window of a prompt only (an approximation).",
)  # fmt: skip
_SPECULATE = flags.DEFINE_bool("speculate", False, "Let the draft layers guess ahead.")
_NUMERICS = flags.DEFINE_enum(
  "numerics", None, ["exact", "kvquant", "official"],
  "What is rounded; kvquant and official pack the cache. By default as the model was made.",
)  # fmt: skip
_STOP = flags.DEFINE_bool("stop", True, "Stop at the tokenizer's end token.")
_JSON = flags.DEFINE_string("json", None, "Write the results to this file as a JSON list.")
flags.mark_flags_as_required(["model"])


def main(argv: Sequence[str]) -> None:
  if argv[1:]:
    command_line.fail(f"{argv[1]}: not understood; everything is given as --flag=value")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.FATAL)  # Orbax logs a page about each checkpoint
  json_file = pathlib.Path(_JSON.value) if _JSON.value else None
  command_line.check_output("json", _JSON.value)
  try:
    prompts = list(_PROMPT.value) + [_ids(text) for text in _IDS.value]
    for path in _FILE.value:
      prompts += generation.read_prompts(pathlib.Path(path))
    options = generation.Options(
      max_new=_MAX_NEW.value,
      sampling=Sampling(_TEMPERATURE.value, _TOP_P.value, _MIN_P.value, _SEED.value),
      slots=_SLOTS.value,
      pool_tokens=_POOL.value,
      prefill=_PREFILL.value,
      speculate=_SPECULATE.value,
      numerics=_NUMERICS.value,
      stop=_STOP.value,
    )
    results = generation.run(pathlib.Path(_MODEL.value), prompts, options)
  except (*generation.USER_ERRORS, ValueError) as error:
    command_line.fail(error)
  except BrokenPipeError:  # whoever read the output has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
  if json_file:
    try:
      json_file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    except OSError as error:
      command_line.fail(f"--json={json_file}: cannot be written: {error.strerror}")
  elif len(results) > 1:
    for result in results:
      print(json.dumps(result, ensure_ascii=False))


def _ids(text: str) -> list[int]:
  try:
    return [int(part) for part in text.replace(",", " ").split()]
  except ValueError:
    raise generation.PromptError(f"--ids={text}: must be token ids, like 5,17,23") from None


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse)
