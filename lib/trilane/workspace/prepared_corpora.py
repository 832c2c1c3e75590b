"""Which pair is made from a source, known without reading its text: its name has the size and time
of its files.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from trilane.config.training import Data
from trilane.utils.files import hash_of

# Sources that need no files, and their bytes: of the standard library enough for 50 iterations to
# see new text each.
BUILT_IN = {"stdlib": 4_000_000, "mock": 0}
# Bytes of text that a job still tokenizes itself, while its nodes wait: 8 s with a Hugging Face
# tokenizer, which takes
# 1.9 MB/s on one core here (byte-level BPE of 8,000 entries, Python's standard library), and
# nothing as bytes.
SMALL_BYTES = 16_000_000


def files(path: Path) -> list[Path]:
    """The file itself, or every regular file below the folder, but hidden ones, by name."""
    if not path.is_dir():
        return [path]
    below = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    return [path / file for file in sorted(below) if not f"/{file}".count("/.")]


def pair_of(data: Data, base: Path = Path()) -> str:
    """The prefix of the pair that is made from `data`, which is no blend; relative paths are below
    `base`.

    Its name depends on path, size and modification time of each file of source and tokenizer. Left
    out: a file that was changed and got its earlier size and time back. OSError where a file is
    missing.
    """
    places = [] if data.tokenizer == "bytes" else [data.tokenizer]
    facts: list[object] = []
    if data.source in BUILT_IN:
        facts.append(sys.version)
    else:
        places.insert(0, data.source)
    for place in places:
        path = Path(base, place).resolve()
        stats = [(str(file), file.stat()) for file in files(path)]
        facts += [str(path), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
    name = f"{Path(data.source).stem[:40]}-{hash_of(json.dumps(facts))}"
    return str(Path(data.folder, name))


def existing_pair(source: str) -> str | None:
    """The prefix that `source` names, with or without suffix; None where there is no pair."""
    prefix = source.removesuffix(".bin").removesuffix(".idx")
    if Path(prefix + ".idx").is_file() or Path(prefix + ".bin").is_file():
        return prefix
    return None


def unprepared(
    sources: Iterable[Data], base: Path = Path(), above: int = SMALL_BYTES
) -> dict[str, int]:
    """The sources that are still to be tokenized and have more than `above` bytes, with their
    bytes.
    """
    large = {}
    for data in sources:
        place = Path(base, data.source)
        if data.source in BUILT_IN or existing_pair(str(place)) or not place.exists():
            continue
        size = sum(file.stat().st_size for file in files(place))
        if size > above and not existing_pair(str(Path(base, pair_of(data, base)))):
            large[data.source] = size
    return large


def require_prepared(sources: Iterable[Data]) -> None:
    """ValueError where a job would tokenize a large corpus while all its nodes wait."""
    for source, size in unprepared(sources).items():
        rule = f"has {size / 1e9:.3g} GB of text that are not prepared, and all nodes would wait"
        cure = "run `trilane slurm script --template prepare` as a job"
        raise ValueError(f"data.source={source}: {rule}: {cure}")
