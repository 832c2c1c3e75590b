"""Which pair is made from a source, known without reading its text: its name has the size and time
of its files.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from trilane.config.training import Data
from trilane.utils.validation import require

# Sources that need no files, and their bytes: of the standard library enough for 50 iterations to
# see new text each.
BUILT_IN = {"stdlib": 4_000_000, "mock": 0}
# Bytes of text that a job still tokenizes itself, while its nodes wait: 8 s with a Hugging Face
# tokenizer, which takes
# 1.9 MB/s on one core here (byte-level BPE of 8,000 entries, Python's standard library), and
# nothing as bytes.
SMALL_BYTES = 16_000_000


def files(path: Path) -> list[Path]:
    """The file itself, or every regular file below the folder without hidden ones, sorted by name."""
    if not path.is_dir():
        return [path]
    found = (p for p in path.rglob("*") if p.is_file())
    return sorted(
        p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)
    )


def pair_of(data: Data, base: Path = Path()) -> str:
    """The prefix of the pair that is made from `data`, which is no blend; relative paths are below
    `base`.

    Its name depends on path, size and modification time of each file of source and tokenizer. Left
    out: a file that was changed and got its earlier size and time back. OSError where a file is
    missing.
    """
    facts: list[object] = [sys.version] if data.source in BUILT_IN else []
    for place in ([] if facts else [data.source]) + (
        [] if data.tokenizer == "bytes" else [data.tokenizer]
    ):
        path = Path(base, place).resolve()
        facts += [
            str(path),
            [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files(path)],
        ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return str(
        Path(data.folder, f"{Path(data.source).stem[:40]}-{digest}")
    )  # with what is added, a file name


def _is_prepared(data: Data, base: Path) -> bool:
    with contextlib.suppress(OSError):
        return all(
            Path(base, pair_of(data, base) + ending).is_file() for ending in (".idx", ".bin")
        )
    return False


def existing_pair(source: str) -> str | None:
    """The prefix that `source` names, with or without its suffix; None where there is no such pair."""
    prefix = source.removesuffix(".bin").removesuffix(".idx")
    return prefix if Path(prefix + ".idx").is_file() or Path(prefix + ".bin").is_file() else None


def tokens_about(data: Data, base: Path, vocabulary: int) -> float:
    """Tokens of a source, roughly and without reading it; 0 where it is missing or made on the fly."""
    # A pair has 2 bytes a token, 4 from 65,500 ids on, as Megatron writes it; text a byte a token,
    # or with a Hugging Face tokenizer about 4 (OpenAI's page of its tokenizers, for English:
    # platform.openai.com/tokenizer).
    if data.source in BUILT_IN:
        return float(BUILT_IN[data.source])
    place = Path(base, data.source)
    prefix = existing_pair(str(place))
    if prefix and Path(prefix + ".bin").is_file():
        return Path(prefix + ".bin").stat().st_size / (2 if vocabulary < 65500 else 4)
    return _bytes(place) / (1 if data.tokenizer == "bytes" else 4)


def _bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in files(place)) if place.exists() else 0


def unprepared(
    sources: Iterable[Data], base: Path = Path(), above: int = SMALL_BYTES
) -> dict[str, int]:
    """The sources that are still to be tokenized and have more than `above` bytes, with their
    bytes.
    """
    found = {}
    for data in sources:
        place = Path(base, data.source)
        is_text = data.source not in BUILT_IN and not existing_pair(str(place))
        if is_text and (size := _bytes(place)) > above and not _is_prepared(data, base):
            found[data.source] = size
    return found


def require_prepared(sources: Iterable[Data]) -> None:
    """ValueError where a job would tokenize a large corpus while all its nodes wait."""
    for source, size in unprepared(sources).items():
        rule = f"has {size / 1e9:.3g} GB of text that are not prepared, and all nodes would wait"
        require(
            False,
            "data.source",
            source,
            f"{rule}: run `trilane slurm script --template prepare` as a job",
        )
