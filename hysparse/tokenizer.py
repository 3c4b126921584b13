"""Text to token ids and back, and the map from token ids to Engram's compressed ids.

    tokenizer = build("bpe:1024", texts)        # trained once, then read from the cache
    ids_S = tokenizer.encode("def f():")
    bits_per_byte = bits.sum() / tokenizer.byte_lengths[ids_S].sum()

Kinds: "bytes" (256 byte values and three special ids), "bpe:N" (byte-level BPE of exactly N ids,
trained on the given texts) and the path of any `tokenizer.json`. Ours follow the released model:
0 begins a text, 1 ends it, 2 is padding. Everything but "bytes" needs the `tokenizers` package.
"""

from __future__ import annotations

import abc
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import Int32

from hysparse import json_text

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
FILE_NAME = "tokenizer.json"

# How the special tokens of published tokenizers are spelled, the usual spelling first.
_BAR = "\uff5c"  # a full-width bar, in DeepSeek's
_SPELLINGS = {
  "bos": (BOS, "<s>", "<|begin_of_text|>", f"<{_BAR}begin▁of▁sentence{_BAR}>", "[CLS]"),
  "eos": (EOS, "</s>", "<|end_of_text|>", f"<{_BAR}end▁of▁sentence{_BAR}>", "[SEP]"),
  "pad": (PAD, "[PAD]", "<|finetune_right_pad_id|>", f"<{_BAR}▁pad▁{_BAR}>", "<|padding|>"),
}
_BYTES_FILE = {"hysparse": "bytes"}  # what tokenizer.json holds for ByteTokenizer
_SMALLEST_BPE = 3 + 256  # special ids and single bytes
_RECIPE = "byte-level bpe 1"  # part of the cache key; changes whenever `train_bpe` would


class TokenizerError(ValueError):
  """A tokenizer that cannot be read, trained or used; the message names it."""


class Tokenizer(abc.ABC):
  """What every kind offers.

  Attributes:
    vocab_size: ids are 0..vocab_size-1.
    bos_id, eos_id, pad_id: the special ids; `encode` never returns one, whatever the text spells.
    byte_lengths: UTF-8 bytes of text that each id stands for, 0 for special ids.
    fingerprint: digest of everything that decides the ids; equal means interchangeable.
  """

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int
  byte_lengths: Int32[np.ndarray, "vocab"]
  fingerprint: str

  @abc.abstractmethod
  def encode(self, text: str) -> Int32[np.ndarray, "S"]:
    """Token ids of a text, without any special id."""

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Text of token ids. Special and unknown ids give nothing, broken UTF-8 gives U+FFFD."""

  @abc.abstractmethod
  def token(self, index: int) -> str:
    """The raw form of one id: of a byte-level token, one character for each byte."""

  @abc.abstractmethod
  def token_text(self, index: int) -> str:
    """What one id alone decodes to, special ids included; U+FFFD where its UTF-8 is partial."""

  @abc.abstractmethod
  def to_json(self) -> str:
    """The content of a `tokenizer.json` that `load` reads back."""

  def save(self, folder: str | os.PathLike) -> None:
    """Writes `folder/tokenizer.json` in one step: readers see the old file or the new one.

    Raises:
      TokenizerError: it cannot be written.
    """
    _write(Path(folder) / FILE_NAME, self.to_json())


class ByteTokenizer(Tokenizer):
  """One id for each byte of UTF-8, behind the three special ids."""

  _FIRST = 3

  def __init__(self):
    self.bos_id, self.eos_id, self.pad_id = range(self._FIRST)
    self.vocab_size = self._FIRST + 256
    self.byte_lengths = (np.arange(self.vocab_size) >= self._FIRST).astype(np.int32)
    self.fingerprint = _digest(self.to_json())

  def encode(self, text: str) -> Int32[np.ndarray, "S"]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + self._FIRST

  def decode(self, ids: Iterable[int]) -> str:
    ids_S = np.asarray(list(ids), np.int64)
    values_S = ids_S[(ids_S >= self._FIRST) & (ids_S < self.vocab_size)] - self._FIRST
    return values_S.astype(np.uint8).tobytes().decode(errors="replace")

  def token(self, index: int) -> str:
    return (BOS, EOS, PAD)[index] if index < self._FIRST else chr(index - self._FIRST)

  def token_text(self, index: int) -> str:
    return self.token(index) if index < self._FIRST else self.decode([index])

  def to_json(self) -> str:
    return json.dumps(_BYTES_FILE)


class JsonTokenizer(Tokenizer):
  """Whatever a `tokenizer.json` of the `tokenizers` library describes.

  Args:
    text: its content.
    name: what error messages call it.

  Raises:
    TokenizerError: not such a file, or begin, end or padding is not among its added tokens.
  """

  def __init__(self, text: str, name: str = FILE_NAME):
    try:
      self._library = _tokenizers().Tokenizer.from_str(text)
    except TokenizerError:
      raise
    except Exception as error:  # the library raises bare Exception
      raise TokenizerError(f"{name}: is no tokenizer.json: {error}") from None
    self._library.encode_special_tokens = True  # a text that spells <eos> is text, not an end
    self._library.no_truncation()
    self._library.no_padding()
    self._text = text
    self.fingerprint = _digest(text)
    self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
    self.bos_id, self.eos_id, self.pad_id = self._find_special_ids(name)
    self.byte_lengths = self._count_bytes()

  def __reduce__(self):
    return (JsonTokenizer, (self._text,))

  def encode(self, text: str) -> Int32[np.ndarray, "S"]:
    # The "fast" call skips the offsets of tokens in the text; only the batch form has it.
    [encoding] = self._library.encode_batch_fast([text], add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    return self._library.decode([int(i) for i in ids], skip_special_tokens=True)

  def token(self, index: int) -> str:
    return self._library.id_to_token(index) or ""

  def token_text(self, index: int) -> str:
    return self._library.decode([index], skip_special_tokens=False)

  def to_json(self) -> str:
    return self._text

  def _find_special_ids(self, name: str) -> list[int]:
    ids = {added.content: i for i, added in self._library.get_added_tokens_decoder().items()}
    found = {
      role: next((ids[s] for s in spellings if s in ids), None)
      for role, spellings in _SPELLINGS.items()
    }
    missing = [role for role, index in found.items() if index is None]
    if missing:
      wanted = "; ".join(f"{role}: {' '.join(_SPELLINGS[role])}" for role in missing)
      raise TokenizerError(
        f"{name}: no {' and no '.join(missing)} token among its added tokens (looked for {wanted})"
      )
    return list(found.values())

  def _count_bytes(self) -> Int32[np.ndarray, "vocab"]:
    """Bytes an id adds to a text that it does not begin.

    A byte-level token has a character for each byte and a byte-fallback token (<0x0A>) is one byte;
    any other is decoded behind a token of known text, since some decoders drop a leading space.
    """
    library = self._library
    decoder = json.loads(self._text).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    byte_level = any(part.get("type") == "ByteLevel" for part in parts)
    added = library.get_added_tokens_decoder()
    lengths = np.zeros(self.vocab_size, np.int32)
    for token, index in library.get_vocab(with_added_tokens=True).items():
      if index in added:
        lengths[index] = 0 if added[index].special else len(token.encode())
      elif byte_level:
        lengths[index] = len(token)
      elif len(token) == 6 and token.startswith("<0x"):
        lengths[index] = 1
      else:
        text = library.decoder.decode(["a", token]) if library.decoder else "a" + token
        lengths[index] = len(text.encode()) - 1
    return lengths


def build(
  kind: str, texts: Iterable[str] = (), cache_dir: str | os.PathLike | None = None
) -> Tokenizer:
  """The tokenizer that `data.tokenizer` names: "bytes", "bpe:N" or the path of a tokenizer.json.

  Args:
    texts: what a BPE is trained on; not touched for the other kinds.
    cache_dir: see `train_bpe`.

  Raises:
    TokenizerError: naming the kind.
  """
  if kind == "bytes":
    return ByteTokenizer()
  name, _, size = kind.partition(":")
  if name == "bpe" and size.isdecimal():
    return train_bpe(texts, int(size), cache_dir)
  if not Path(kind).exists():
    raise TokenizerError(
      f"data.tokenizer: is {kind!r}, and no such file exists; must be 'bytes', 'bpe:N' or the path"
      " of a tokenizer.json"
    )
  return load(kind)


def load(path: str | os.PathLike) -> Tokenizer:
  """Reads a tokenizer.json, or the one in a folder; what `save` wrote, or any other.

  Raises:
    TokenizerError: naming the file.
  """
  path = Path(path)
  path = path / FILE_NAME if path.is_dir() else path
  try:
    text = path.read_text(encoding="utf-8")
    is_bytes = json_text.parse(text, repeats=True) == _BYTES_FILE
  except OSError as error:
    raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None
  except ValueError as error:
    raise TokenizerError(f"{path}: is no tokenizer.json: {error}") from None
  return ByteTokenizer() if is_bytes else JsonTokenizer(text, str(path))


def train_bpe(
  texts: Iterable[str], size: int, cache_dir: str | os.PathLike | None = None
) -> Tokenizer:
  """A byte-level BPE of exactly `size` ids (3 special, 256 bytes, merges), trained or cached.

  The same texts in the same order give the same tokenizer.

  Args:
    texts: read once, kept in memory.
    size: at least 259, the special ids and the bytes.
    cache_dir: trained tokenizers are kept here, named by size and a digest of the texts. None: the
      folder of the environment variable HYSPARSE_CACHE, else ~/.cache/hysparse.

  Raises:
    TokenizerError: texts too small or too uniform for that many ids, or a cache that cannot be
      written.
  """
  if size < _SMALLEST_BPE:
    raise TokenizerError(f"data.tokenizer: is 'bpe:{size}'; a BPE has at least {_SMALLEST_BPE} ids")
  texts = list(texts)
  folder = Path(cache_dir or os.environ.get("HYSPARSE_CACHE") or Path.home() / ".cache/hysparse")
  path = folder / f"bpe-{size}-{_digest(_RECIPE, *texts)}.json"
  if not path.exists():
    _write(path, _train(texts, size), hint=" (HYSPARSE_CACHE names the folder of caches)")
  return load(path)


def _train(texts: Sequence[str], size: int) -> str:
  library = _tokenizers()
  tokenizer = library.Tokenizer(library.models.BPE())
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[BOS, EOS, PAD],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  reached = tokenizer.get_vocab_size(with_added_tokens=True)
  if reached != size:
    raise TokenizerError(
      f"data.tokenizer: is 'bpe:{size}'; the {len(texts)} training texts give {reached} ids: bring"
      f" more text or use 'bpe:{reached}'"
    )
  return tokenizer.to_str()


def engram_token_map(tokenizer: Tokenizer) -> Int32[np.ndarray, "vocab"]:
  """The compressed id of each token id: ids whose text normalises alike share one.

  Compressed ids are numbered by first occurrence, so the highest plus one is how many there are.
  A token with partial UTF-8 keeps its raw form; one that normalises to nothing keeps its text.

  Source: arXiv 2609.19969, Engram; the normaliser is the released one, so the `tokenizers` library
  runs it (another Unicode version could number the ids differently).
  """
  normalise = _engram_normaliser()
  compressed: dict[str, int] = {}

  def compress(index: int) -> int:
    text = tokenizer.token_text(index)
    partial = "\N{REPLACEMENT CHARACTER}" in text
    key = tokenizer.token(index) if partial else normalise(text) or text
    return compressed.setdefault(key, len(compressed))

  return np.asarray([compress(i) for i in range(tokenizer.vocab_size)], np.int32)


def _engram_normaliser():
  library = _tokenizers()
  n = library.normalizers
  lone_space = "\ue000"  # stands in for a lone space while the others are stripped
  steps = [
    n.NFKC(),
    n.NFD(),
    n.StripAccents(),
    n.Lowercase(),
    n.Replace(library.Regex("[ \t\r\n]+"), " "),
    n.Replace(library.Regex("^ $"), lone_space),
    n.Strip(),
    n.Replace(lone_space, " "),
  ]
  return n.Sequence(steps).normalize_str


def _tokenizers() -> ModuleType:
  try:
    import tokenizers
  except ImportError:
    raise TokenizerError(
      "the tokenizers package is not installed: pip install hysparse[train]"
    ) from None
  return tokenizers


def _digest(*parts: str) -> str:
  """SHA-256 of the parts, each delimited by its length."""
  digest = hashlib.sha256()
  for part in parts:
    data = part.encode()
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
  return digest.hexdigest()[:32]


def _write(path: Path, text: str, hint: str = "") -> None:
  """Writes a file in one step: complete under its name, or not there."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
      "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
    ) as file:
      file.write(text)
    os.chmod(file.name, 0o644)  # temporary files are their owner's alone
    os.replace(file.name, path)
  except OSError as error:
    raise TokenizerError(f"{path}: cannot be written: {error.strerror}{hint}") from None
