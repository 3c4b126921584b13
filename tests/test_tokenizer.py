"""Tokenizers: round trips, bytes behind ids, special ids, the cache, and Engram's id map."""

import json
import pickle
import re
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from hysparse import tokenizer as tokenizer_lib
from hysparse.tokenizer import TokenizerError

TEXTS = [
  "def add(first, second):\n    return first + second\n",
  "class Größe:\n\tdef Add(self):\n\t\treturn self.größe   # naïve Ärger\n",
  "DEF def Def  deF\n\n\n  ADD add\r\n résumé resume Résumé 北京大学 北京 ﬁne fine\n" * 3,
]
SIZE = 340


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
  return tokenizer_lib.train_bpe(TEXTS, SIZE, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizers(bpe):
  return {"bytes": tokenizer_lib.ByteTokenizer(), "bpe": bpe, "metaspace": _metaspace()}


def _metaspace():
  """A tokenizer of another make: words begin with a bar, unknown characters become bytes."""
  words = ["▁", "a", "b", "c", "▁a", "bc", "é"]
  vocab = ["<s>", "</s>", "[PAD]", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
  built = library.Tokenizer(
    library.models.BPE(
      {token: i for i, token in enumerate(vocab)},
      [("▁", "a"), ("b", "c")],
      unk_token="<unk>",
      byte_fallback=True,
    )
  )
  built.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="never")
  d = library.decoders
  built.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
  built.add_special_tokens(["<s>", "</s>", "[PAD]"])
  return tokenizer_lib.JsonTokenizer(built.to_str())


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace"])
@settings(max_examples=60, derandomize=True, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_round_trip_and_bytes(tokenizers, kind, text):
  tokenizer = tokenizers[kind]
  ids_S = tokenizer.encode(text)
  assert ids_S.dtype == np.int32 and ids_S.ndim == 1
  assert tokenizer.decode(ids_S) == text
  assert tokenizer.byte_lengths[ids_S].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace"])
def test_special_ids_are_never_in_a_text(tokenizers, kind):
  tokenizer = tokenizers[kind]
  special = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
  assert special == [0, 1, 2]
  assert not tokenizer.byte_lengths[special].any()
  spelled = "".join(tokenizer.token(i) for i in special)
  ids_S = tokenizer.encode(f"a{spelled}b")
  assert not np.isin(ids_S, special).any()
  assert tokenizer.decode([*special, *ids_S, *special]) == f"a{spelled}b"
  assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_bpe_has_exactly_its_size(bpe):
  assert bpe.vocab_size == SIZE == len(bpe.byte_lengths)
  used = np.unique(np.concatenate([bpe.encode(text) for text in TEXTS]))
  assert (bpe.byte_lengths[used] > 1).any(), "nothing was merged"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace"])
def test_saved_and_pickled_are_the_same(tokenizers, kind, tmp_path):
  tokenizer = tokenizers[kind]
  tokenizer.save(tmp_path / "run")
  copies = [
    tokenizer_lib.load(tmp_path / "run"),
    tokenizer_lib.load(tmp_path / "run" / "tokenizer.json"),
    tokenizer_lib.build(str(tmp_path / "run")),
    pickle.loads(pickle.dumps(tokenizer)),
  ]
  for copy in copies:
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(copy.byte_lengths, tokenizer.byte_lengths)
    for text in [*TEXTS, "<eos></s>"]:
      np.testing.assert_array_equal(copy.encode(text), tokenizer.encode(text))
  assert [p.name for p in (tmp_path / "run").iterdir()] == ["tokenizer.json"]


def test_fingerprints_differ(tokenizers):
  assert len({t.fingerprint for t in tokenizers.values()}) == 3


def test_training_is_deterministic_across_processes(bpe, tmp_path):
  code = (
    "import json, sys; from hysparse import tokenizer as t;"
    f"print(t.train_bpe(json.loads(sys.argv[1]), {SIZE}, sys.argv[2]).fingerprint)"
  )
  arguments = [sys.executable, "-c", code, json.dumps(TEXTS), str(tmp_path)]
  out = subprocess.run(arguments, capture_output=True, text=True, check=True)
  assert out.stdout.strip() == bpe.fingerprint


def test_cache_is_used_and_keyed(tmp_path, monkeypatch):
  monkeypatch.setenv("HYSPARSE_CACHE", str(tmp_path))
  trained = []
  train = tokenizer_lib._train
  monkeypatch.setattr(tokenizer_lib, "_train", lambda *args: trained.append(args) or train(*args))
  first = tokenizer_lib.build("bpe:300", iter(TEXTS))
  again = tokenizer_lib.build("bpe:300", iter(TEXTS))
  assert len(trained) == 1 and first.fingerprint == again.fingerprint
  tokenizer_lib.build("bpe:301", TEXTS)
  tokenizer_lib.build("bpe:300", TEXTS[:2])
  tokenizer_lib.build("bpe:300", [TEXTS[0] + TEXTS[1], TEXTS[2]])
  assert len(trained) == 4
  assert len(list(tmp_path.iterdir())) == 4


def test_a_json_of_others_may_begin_or_cut_texts(tokenizers):
  """Truncation, padding and template of the file are for its model's input, not for data."""
  built = library.Tokenizer.from_str(tokenizers["metaspace"].to_json())
  built.enable_truncation(2)
  built.enable_padding(length=9, pad_id=2, pad_token="[PAD]")
  built.post_processor = library.processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
  )
  ids_S = tokenizer_lib.JsonTokenizer(built.to_str()).encode("a a bc")
  np.testing.assert_array_equal(ids_S, tokenizers["metaspace"].encode("a a bc"))


@pytest.mark.parametrize(
  ("kind", "message"),
  [
    ("nowhere/tokenizer.json", "data.tokenizer: is 'nowhere/tokenizer.json', and no such file"),
    ("bpe:100", "data.tokenizer: is 'bpe:100'; a BPE has at least 259 ids"),
    ("bpe:5000", r"'bpe:5000'; the 3 training texts give \d+ ids"),
  ],
)
def test_refused_kinds(kind, message, tmp_path):
  with pytest.raises(TokenizerError, match=message):
    tokenizer_lib.build(kind, TEXTS, tmp_path)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("not json", "tokenizer.json: is no tokenizer.json"),
    ('{"model": 3}', "tokenizer.json: is no tokenizer.json"),
  ],
)
def test_refused_files(content, message, tmp_path):
  (tmp_path / "tokenizer.json").write_text(content)
  with pytest.raises(TokenizerError, match=message) as caught:
    tokenizer_lib.load(tmp_path)
  assert "\n" not in str(caught.value)


def test_missing_special_tokens_are_all_named(tmp_path):
  built = library.Tokenizer(library.models.BPE({"a": 0}, []))
  built.add_special_tokens(["</s>"])
  built.save(str(tmp_path / "tokenizer.json"))
  with pytest.raises(TokenizerError, match="no bos and no pad token") as caught:
    tokenizer_lib.load(tmp_path)
  assert "[PAD]" in str(caught.value) and "\n" not in str(caught.value)


def test_cache_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(TokenizerError, match=r"cannot be written: .*HYSPARSE_CACHE"):
    tokenizer_lib.train_bpe(TEXTS, 300, tmp_path / "file")


def test_without_the_library(monkeypatch, bpe):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  assert tokenizer_lib.build("bytes").decode(tokenizer_lib.build("bytes").encode("é")) == "é"
  for needs in (
    lambda: tokenizer_lib.JsonTokenizer(bpe.to_json()),
    lambda: tokenizer_lib.engram_token_map(bpe),
  ):
    with pytest.raises(TokenizerError, match=r"pip install hysparse\[train\]"):
      needs()


def test_import_is_light():
  code = (
    "import sys, hysparse.tokenizer;"
    "print([m for m in ('jax', 'tokenizers', 'grain') if m in sys.modules])"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == "[]"


# --- Engram's map --------------------------------------------------------------------------------


def _slow_key(tokenizer, index):
  """The rule of the report with Python's own Unicode tables."""
  text = tokenizer.token_text(index)
  if "\ufffd" in text:
    return tokenizer.token(index)
  plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
  plain = "".join(c.lower() for c in plain if not unicodedata.category(c).startswith("M"))
  plain = re.sub("[ \t\r\n]+", " ", plain)
  return plain if plain == " " else plain.strip() or text


@pytest.mark.parametrize("kind", ["bytes", "bpe", "metaspace"])
def test_engram_map_by_another_route(tokenizers, kind):
  tokenizer = tokenizers[kind]
  found_V = tokenizer_lib.engram_token_map(tokenizer)
  numbers = {}
  wanted = [
    numbers.setdefault(_slow_key(tokenizer, i), len(numbers)) for i in range(tokenizer.vocab_size)
  ]
  assert found_V.dtype == np.int32
  np.testing.assert_array_equal(found_V, wanted)
  assert found_V.max() + 1 == len(numbers) < tokenizer.vocab_size


def test_engram_map_merges_what_it_should(bpe):
  """A tokenizer of whole words, so that each case of the rule is an id of its own."""
  words = [
    "def", " Def", "DEF ", "résumé", "Resume", "ﬁne", "fine", " ", "\n", "\t \r\n", "x", "北京",
    "Σ", "\u03c3", "\u0301", "\x1c", "\ue000",
  ]  # fmt: skip
  built = library.Tokenizer(library.models.WordLevel({w: i + 3 for i, w in enumerate(words)}))
  built.add_special_tokens(["<bos>", "<eos>", "<pad>"])
  spec = json.loads(built.to_str())
  for added in spec["added_tokens"]:
    added["id"] = ["<bos>", "<eos>", "<pad>"].index(added["content"])
  spec["model"]["vocab"] |= {a["content"]: a["id"] for a in spec["added_tokens"]}
  tokenizer = tokenizer_lib.JsonTokenizer(json.dumps(spec))
  map_V = tokenizer_lib.engram_token_map(tokenizer)
  of = {word: int(map_V[i + 3]) for i, word in enumerate(words)}
  assert list(map_V[:4]) == [0, 1, 2, 3]  # special tokens count, numbers by first occurrence
  assert of["def"] == of[" Def"] == of["DEF "]
  assert of["résumé"] == of["Resume"]
  assert of["ﬁne"] == of["fine"]
  assert of[" "] == of["\n"] == of["\t \r\n"] == of["\ue000"]
  assert of["Σ"] == of["\u03c3"]
  distinct = [of[w] for w in ("def", "résumé", "ﬁne", " ", "x", "北京", "Σ", "\u0301", "\x1c")]
  assert len(set(distinct)) == len(distinct)


def test_partial_utf8_keeps_its_raw_form():
  tokenizer = tokenizer_lib.ByteTokenizer()
  map_V = tokenizer_lib.engram_token_map(tokenizer)
  assert len(np.unique(map_V[3 + 128 :])) == 128
  assert map_V[3 + ord("A")] == map_V[3 + ord("a")]
