"""A plan's data source as Megatron's indexed dataset (.bin and .idx): made once, under a name that says its content.

`python -m trilane.engine.data.corpus plan.json` makes it, or all of a blend, and prints the prefixes.
torch is imported only when there is work.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trilane.config.model import ModelShape
from trilane.config.plan import Data, read_plan
from trilane.engine.data.indexed_dataset import check_pair
from trilane.engine.data.sources import documents
from trilane.engine.data.tokenizer import Tokenizer, tokenizer
from trilane.utils.files import lock
from trilane.utils.validation import require


def prepare(data: Data, shape: ModelShape) -> str:
    """The prefix of the .bin/.idx pair that holds `data`, made now unless it is there; safe to call twice at once.

    An existing pair given as source is checked and used as it is. Raises ValueError, one line, where the source is
    missing, empty, not UTF-8, shorter than one sample of `shape`, truncated, or has ids beyond the vocabulary.
    """
    coder = tokenizer(data.tokenizer)
    rule = f"tokenizer {coder.name} has {coder.size} ids; pad the vocabulary up, not down"
    require(coder.size <= shape.vocab_size, "vocab_size", shape.vocab_size, rule)
    given = _existing_pair(data.source)
    prefix = given or _prepared(data, coder)
    tokens, largest = check_pair(prefix, largest_token=given is not None)
    rule = f"has {tokens} tokens, one sample needs {shape.seq_length + 1}"
    require(tokens > shape.seq_length, "data.source", data.source, rule)
    rule = f"holds token {largest}, the vocabulary ends before vocab_size={shape.vocab_size}"
    require(largest < shape.vocab_size, "data.source", data.source, rule)
    return prefix


def prepare_all(data: Data, shape: ModelShape) -> list[str]:
    """The prefixes of all sources of `data`, in order: one, or those of its blend; raises ValueError as prepare()."""
    if not data.blend:
        return [prepare(data, shape)]
    return [prepare(replace(data, source=part.source, blend=()), shape) for part in data.blend]


def _existing_pair(source: str) -> str | None:
    """The prefix that `source` names, with or without its suffix; None where there is no such pair."""
    prefix = source.removesuffix(".bin").removesuffix(".idx")
    return prefix if Path(prefix + ".idx").is_file() or Path(prefix + ".bin").is_file() else None


def _prepared(data: Data, coder: Tokenizer) -> str:
    """The pair in data.folder that holds the source's documents, written if it is not there."""
    texts = list(documents(data.source))
    require(any(texts), "data.source", data.source, "is empty")
    folder = Path(data.folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = "mock" if data.source == "mock" else Path(data.source).stem
    prefix = folder / f"{name}-{_digest(texts, coder)}"
    with locked(prefix.with_name(prefix.name + ".lock")):
        if not prefix.with_name(prefix.name + ".idx").is_file():
            _write(texts, coder, prefix)
    return str(prefix)


def _digest(texts: list[str], coder: Tokenizer) -> str:
    digest = hashlib.sha256(coder.digest.encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _write(texts: list[str], coder: Tokenizer, prefix: Path) -> None:
    """Write the pair through megatron-core's own builder, aside first; the .idx comes last and makes it complete."""
    from trilane.engine.data.indexed_dataset import write_pair

    aside = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    write_pair((coder.encode(text) for text in texts if text), str(aside), coder.size)
    for suffix in (".bin", ".idx"):
        os.replace(f"{aside}{suffix}", f"{prefix}{suffix}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time gets in; the lock ends with the process that holds it.

    Without locks (files.lock) all get in: each writes under a name of its own and renames, and all write the same.
    """
    with path.open("w") as file:
        lock(file)
        yield


def main(argv: list[str]) -> int:
    """Prepare the data of the plan at argv[0] and print the prefixes; 2 and one line where that is impossible."""
    try:
        plan = read_plan(argv[0])
        print(*prepare_all(plan.data, plan.shape), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
