"""A plan's data source as Megatron's indexed dataset (.bin and .idx): made once, named by a hash of its content.

`python -m trilane.engine.data.corpus plan.json` makes it, or all of a blend, and prints the prefixes; with --in-job,
where nodes wait, it refuses to make a large one. torch is not imported, which would take seconds.
"""

import contextlib
import hashlib
import os
import secrets
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trilane.config.model import ModelShape
from trilane.config.plan import read_plan
from trilane.config.training import Data
from trilane.engine.data.text import Tokenizer, documents, tokenizer
from trilane.utils.folder_lock import FolderLock
from trilane.utils.validation import require, shown
from trilane.workspace.prepared_corpora import BUILT_IN, existing_pair, record, record_path, recorded, require_prepared

# megatron-core 0.16.1, core/datasets/indexed_dataset.py: magic, version, code of the token type, sequences, documents;
# then int32 lengths and int64 offsets of the sequences, and int64 documents.
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")


SCANNED_TOKENS = (
    100_000_000  # of an existing pair, for ids beyond the vocabulary: under a second; the loader checks all
)
CHUNK = 10_000_000  # sequences of an index that are checked at a time
WEEK_S = 7 * 86400.0  # for the lock of a large corpus, which takes hours to tokenize
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write_pair(arrays: Iterable[np.ndarray], prefix: str, vocabulary: int) -> None:
    """Write one document per array of token ids, in 16 bits where megatron-core's builder would; without its import."""
    dtype = np.uint16 if vocabulary < 65500 else np.int32
    sizes = []
    with open(f"{prefix}.bin", "wb") as data:
        for ids in arrays:
            data.write(ids.astype(dtype).tobytes())
            sizes.append(ids.size)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)[: len(sizes)] * np.dtype(dtype).itemsize
    code = next(code for code, name in DTYPES.items() if name is dtype)
    with open(f"{prefix}.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
        for part in (np.array(sizes, dtype=np.int32), starts, np.arange(len(sizes) + 1, dtype=np.int64)):
            index.write(part.tobytes())


def check_pair(prefix: str, largest_token: bool = False) -> tuple[int, int]:
    """(tokens, largest id) of the pair, the latter 0 unless `largest_token`; checks that header and sizes agree.

    Raises ValueError where a file is missing, is no index, is truncated, or `.idx` describes something else than `.bin`
    holds: megatron-core would fail an assertion, or read beyond the end.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        require(path.is_file(), "data.source", path, "is missing from the .bin/.idx pair")
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    require(len(head) == HEADER.size and head.startswith(MAGIC), "data.source", index, "is not a Megatron index")
    _, version, code, sequences, documents = HEADER.unpack(head)
    require(version == 1 and code in DTYPES, "data.source", index, f"has unknown version {version} or type {code}")
    expected = HEADER.size + sequences * 12 + documents * 8
    require(size >= expected, "data.source", index, f"is truncated: {size} bytes, its header requires {expected}")
    require(sequences > 0, "data.source", prefix, "is empty")
    lengths = np.memmap(index, np.int32, "r", HEADER.size, (sequences,))
    require(lengths.min() >= 0, "data.source", index, "has a sequence of negative length")
    tokens, item = int(lengths.sum(dtype=np.int64)), np.dtype(DTYPES[code]).itemsize
    needed, size = tokens * item, data.stat().st_size
    require(size >= needed, "data.source", data, f"is truncated: {size} bytes, its index requires {needed}")
    require(tokens > 0, "data.source", prefix, "is empty")
    _require_inside(index, lengths, documents, item, size)
    ids = np.memmap(data, DTYPES[code], "r", 0, (size // item,))[: SCANNED_TOKENS if largest_token else 1]
    require(ids.min() >= 0, "data.source", data, f"holds the negative token {ids.min()}")
    return tokens, int(ids.max()) if largest_token else 0


def _require_inside(index: Path, lengths: np.ndarray, documents: int, item: int, size: int) -> None:
    """ValueError unless each sequence is whole tokens within `size` bytes, and the last document ends with them."""
    sequences = len(lengths)
    starts = np.memmap(index, np.int64, "r", HEADER.size + 4 * sequences, (sequences,))
    for first in range(0, sequences, CHUNK):
        start, length = starts[first : first + CHUNK], lengths[first : first + CHUNK].astype(np.int64)
        inside = (start >= 0) & (start <= size - length * item) & (start % item == 0)
        require(bool(inside.all()), "data.source", index, "has a sequence that does not lie within its .bin")
    ends = np.memmap(index, np.int64, "r", HEADER.size + 12 * sequences, (documents,)) if documents else [0]
    rule = f"has documents of {ends[-1]} sequences, and {sequences} in all"
    require(ends[-1] == sequences, "data.source", index, rule)


def prepare(data: Data, shape: ModelShape) -> str:
    """The prefix of the .bin/.idx pair of `data`, made unless it exists; safe to call concurrently.

    An existing pair given as source is checked and used as it is. Raises ValueError, one line, where the source is
    missing, empty, not UTF-8, shorter than one sample of `shape`, truncated, or has ids beyond the vocabulary, or where
    data.split leaves less than a sample.
    """
    coder = tokenizer(data.tokenizer)
    rule = f"tokenizer {shown(coder.name)} has {coder.size} ids; pad the vocabulary up, not down"
    require(coder.size <= shape.vocab_size, "vocab_size", shape.vocab_size, rule)
    given = existing_pair(data.source)
    prefix = given or _prepared(data, coder)
    tokens, largest = check_pair(prefix, largest_token=given is not None)
    rule = f"has {tokens} tokens, one sample needs {shape.seq_length + 1}"
    require(tokens > shape.seq_length, "data.source", data.source, rule)
    rule = f"holds token {largest}, the vocabulary ends before vocab_size={shape.vocab_size}"
    require(largest < shape.vocab_size, "data.source", data.source, rule)
    _require_shares(data, prefix, shape.seq_length + 1)
    return prefix


def _require_shares(data: Data, prefix: str, needed: int) -> None:
    """ValueError where training or validation has a share, and in its documents less than the `needed` tokens.

    The shares are cut at whole documents, as megatron-core cuts them.
    """
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        _, _, _, sequences, _ = HEADER.unpack(file.read(HEADER.size))
    lengths, (training, validation, _) = np.memmap(index, np.int32, "r", HEADER.size, (sequences,)), data.shares
    for name, begin, share in (("training", 0.0, training), ("validation", training, validation)):
        part = lengths[round(begin * sequences) : round((begin + share) * sequences)]
        tokens = int(part.sum(dtype=np.int64))
        rule = f"leaves {len(part)} documents of {data.source} for {name}, {tokens} tokens; a sample needs {needed}"
        require(share == 0 or tokens >= needed, "data.split", data.split, rule)


def prepare_all(data: Data, shape: ModelShape) -> list[str]:
    """The prefixes of all sources of `data`, in order: one, or those of its blend; raises ValueError as prepare()."""
    return [prepare(part, shape) for part in data.parts]


def _prepared(data: Data, coder: Tokenizer) -> str:
    """The pair in data.folder with the source's documents, written unless it exists.

    The text is read twice, a file or line at a time, so that the memory need not hold it.
    """
    if data.source in BUILT_IN:
        return _made(data, coder)
    if not Path(data.source).exists():
        documents(data.source)  # raises
    note = record_path(data)  # of the files as they are before they are read
    known = recorded(data)
    if not known:
        known = _made(data, coder)
        require(record_path(data) == note, "data.source", data.source, "was changed while it was prepared")
        record(note, data.source, known)
    return known


def _made(data: Data, coder: Tokenizer) -> str:
    digest = _digest(documents(data.source), coder)
    require(any(documents(data.source)), "data.source", data.source, "is empty")
    folder = Path(data.folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = "mock" if data.source == "mock" else Path(data.source).stem[:40]  # with what is added, a file name
    prefix = folder / f"{name}-{digest}"
    with locked(prefix.with_name(prefix.name + ".lock")):
        if not prefix.with_name(prefix.name + ".idx").is_file():
            _write(documents(data.source), coder, prefix)
    return str(prefix)


def _digest(texts: Iterable[str], coder: Tokenizer) -> str:
    digest = hashlib.sha256(coder.digest.encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _write(texts: Iterable[str], coder: Tokenizer, prefix: Path) -> None:
    """Write the pair under temporary names, then rename; the .idx comes last and makes it complete."""
    temporary = prefix.with_name(f".{prefix.name}.{secrets.token_hex(6)}")
    try:
        write_pair((coder.encode(text) for text in texts if text), str(temporary), coder.size)
        for suffix in (".bin", ".idx"):
            os.replace(f"{temporary}{suffix}", f"{prefix}{suffix}")
    finally:
        for suffix in (".bin", ".idx"):
            Path(f"{temporary}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is released with the process that holds it."""
    with FolderLock([path.parent], path.name, "data.folder").held(WEEK_S):
        yield


def main(argv: list[str]) -> int:
    """Prepare the data of the plan in the last argument, print the prefixes; 2 and one line where that is impossible.

    With --in-job a large corpus must be prepared already.
    """
    try:
        plan = read_plan(argv[-1])
        if "--in-job" in argv:
            require_prepared(plan.data.parts)
        print(*prepare_all(plan.data, plan.shape), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
