"""Text and its token ids: the documents of a data source, and tokenizers; no torch here."""

import codecs
import contextlib
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trilane.utils.validation import read_text, require, require_file, shown
from trilane.workspace.prepared_corpora import STDLIB_BYTES, files

MOST_TEXT = 1 << 36  # bytes of a text file, which is held in memory; larger corpora are .bin/.idx pairs
STDLIB_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "su", "te")
MOCK_DOCUMENTS, MOCK_WORDS = 400, 400


def documents(source: str) -> Iterator[str]:
    """The texts of "stdlib", "mock", a text file, a JSONL file (field "text") or a folder of text files, in order.

    Raises ValueError where the path is missing, or a file is no regular file, not UTF-8 or not JSONL.
    """
    if source == "stdlib":
        return stdlib()
    if source == "mock":
        return mock()
    path = Path(source)
    require(path.exists(), "data.source", source, "no such file or folder (known names: stdlib, mock)")
    if path.suffix == ".jsonl" and not path.is_dir():
        return jsonl(path)
    return (read_text(file, "data.source", MOST_TEXT) for file in files(path))


def stdlib() -> Iterator[str]:
    """Python's standard library, a document per file, packages included, up to STDLIB_BYTES."""
    taken = 0
    for path in stdlib_files(Path(sysconfig.get_path("stdlib"))):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old modules are Latin-1
            continue
        taken += len(text)
        if taken > STDLIB_BYTES:
            return
        yield text


def stdlib_files(folder: Path) -> Iterator[Path]:
    """Python's modules below the folder, sorted by name, without entering what is left out: site-packages is large."""
    for path in sorted(folder.iterdir()):
        if path.name in STDLIB_LEFT_OUT:
            continue
        if path.suffix == ".py":
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from stdlib_files(path)


def mock() -> Iterator[str]:
    """Learnable synthetic text: sentences of invented words by one fixed grammar, the same on every machine."""
    rng = random.Random(0)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(n)) for n in [2, 3] * 32]
    follows = {word: rng.sample(words, 4) for word in words}
    for _ in range(MOCK_DOCUMENTS):
        text = [rng.choice(words)]
        for _ in range(MOCK_WORDS):
            text.append(rng.choice(follows[text[-1]]))
        yield " ".join(text)


def jsonl(path: Path) -> Iterator[str]:
    """The field "text" of each line; only a line feed ends a line, since JSON may hold Unicode's other line ends."""
    require_file("data.source", path)
    with path.open("rb") as file:  # a line at a time: it may be larger than the memory
        begin = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text_of(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, path, number, begin)
            begin += len(line)


def _text_of(line: bytes, path: Path, number: int, begin: int) -> str:
    """The field "text" of a line of JSONL, which begins at that byte."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()  # half a surrogate pair is valid JSON, and no text
    except UnicodeDecodeError as error:
        where = f"byte {begin + error.start}"
        raise ValueError(f"data.source={shown(path)}:{number}: not text in UTF-8 ({where})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = None
    require(isinstance(text, str), "data.source", f"{path}:{number}", 'each line must be {"text": "..."}')
    return str(text)


BYTES_END = 256
# Names that tokenizers give the token which ends a document; the first one present is taken.
END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<EOS>")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """`size` ids, `end` closes each document, `digest` identifies it; bytes need no tokenizers package.

    `eod`, `vocab_size` and `unique_identifiers` are the interface of megatron-core's GPT dataset.
    """

    name: str
    size: int
    end: int
    digest: str
    coder: Any = field(default=None, repr=False)

    @property
    def eod(self) -> int:
        """End of document, as megatron-core calls it."""
        return self.end

    @property
    def vocab_size(self) -> int:
        """Number of ids, as megatron-core calls it."""
        return self.size

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What distinguishes this tokenizer in megatron-core's index cache."""
        return {"tokenizer": self.name, "digest": self.digest}

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document, int32, including its end; ValueError where a word has no id."""
        with _refused(self.name, "cannot encode a document"):
            ids = np.frombuffer(text.encode(), np.uint8) if self.coder is None else self.coder.encode(text).ids
        return np.append(np.asarray(ids, np.int32), np.int32(self.end))


@contextlib.contextmanager
def _refused(name: str, rule: str) -> Iterator[None]:
    """What the tokenizers library raises, as ValueError: a plain Exception, or a panic, which is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"data.tokenizer={shown(name)}: {rule} ({shown(error)})") from None


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or the one in the folder `name`, which neither truncates nor pads a document.

    Raises ValueError where the folder has no tokenizer.json, or that is damaged or has no end-of-document token.
    """
    if name == "bytes":
        return Tokenizer(name=name, size=257, end=BYTES_END, digest="bytes-257")
    path = Path(name) / "tokenizer.json"
    require(path.is_file(), "data.tokenizer", name, "no folder with a tokenizer.json (known name: bytes)")
    size = path.stat().st_size
    require(size <= 1 << 26, "data.tokenizer", path, f"has {size} bytes; at most {1 << 26} are read")
    from tokenizers import Tokenizer as Coder

    content = path.read_bytes()
    with _refused(name, "tokenizer.json cannot be read"):
        coder = Coder.from_buffer(content)
    coder.no_truncation()
    coder.no_padding()
    ends = [coder.token_to_id(token) for token in END_NAMES]
    end = next((e for e in ends if e is not None), None)
    require(end is not None, "data.tokenizer", name, f"has none of the end-of-document tokens {', '.join(END_NAMES)}")
    digest = hashlib.sha256(content).hexdigest()[:16]
    assert end is not None
    # A vocabulary may have gaps: the largest id counts, not the number of words.
    return Tokenizer(name=name, size=max(coder.get_vocab().values()) + 1, end=end, digest=digest, coder=coder)
