"""Where text comes from: a plan's data source as documents, each a text; no torch here."""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trilane.utils.validation import require

STDLIB_BYTES = 4_000_000  # enough for 50 iterations to see new text each, little enough to prepare in seconds


STDLIB_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "po", "ri", "su", "te")


MOCK_DOCUMENTS, MOCK_WORDS = 400, 400


def documents(source: str) -> Iterator[str]:
    """The texts of "stdlib", "mock", a text file, a JSONL file (field "text") or a folder of text files, in order.

    Raises ValueError where the path is missing, or a file is not UTF-8 or not JSONL.
    """
    if source == "stdlib":
        return stdlib()
    if source == "mock":
        return mock()
    path = Path(source)
    require(path.exists(), "data.source", source, "no such file or folder (known names: stdlib, mock)")
    if path.suffix == ".jsonl":
        return jsonl(path)
    return (read_text(file) for file in files(path))


def files(path: Path) -> list[Path]:
    """The file itself, or every file of the folder and its folders, hidden ones left out, sorted by name."""
    if path.is_file():
        return [path]
    found = (p for p in path.rglob("*") if p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts))


def stdlib() -> Iterator[str]:
    """Python's standard library, a document per file, packages included, up to STDLIB_BYTES."""
    root, taken = Path(sysconfig.get_path("stdlib")), 0
    for path in sorted(root.rglob("*.py")):
        if any(part in STDLIB_LEFT_OUT for part in path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules are old enough to be Latin-1; there are plenty of others
            continue
        taken += len(text)
        if taken > STDLIB_BYTES:
            return
        yield text


def mock() -> Iterator[str]:
    """Learnable nonsense: sentences of made-up words by one fixed grammar, the same on every machine."""
    chance = random.Random(0)
    words = ["".join(chance.choice(SYLLABLES) for _ in range(n)) for n in [2, 3] * 32]
    follows = {word: chance.sample(words, 4) for word in words}
    for _ in range(MOCK_DOCUMENTS):
        text = [chance.choice(words)]
        for _ in range(MOCK_WORDS):
            text.append(chance.choice(follows[text[-1]]))
        yield " ".join(text)


def jsonl(path: Path) -> Iterator[str]:
    """The field "text" of each line."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        require(isinstance(text, str), "data.source", f"{path}:{number}", 'each line must be {"text": "..."}')
        yield text


def read_text(path: Path) -> str:
    """A file as UTF-8; ValueError names the file and the byte where it is not."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.source={path}: is not UTF-8 (byte {error.start})") from None
