"""A plan's data source as Megatron's indexed dataset (.bin and .idx), made once.

`python -m trilane_engine.data.corpus plan.json` makes it, or all of a blend, and prints the
prefixes; with --in-job, where nodes wait, it refuses to make a large one. torch is imported to make
one, and where there is a GPU that it may be unable to use.
"""

import contextlib
import hashlib
import json
import os
import secrets
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.engines import shows_gpu
from trilane.config.model import ModelShape
from trilane.config.plan import read_plan
from trilane.config.training import Data
from trilane.utils.folder_lock import FolderLock
from trilane.utils.frozen import frozen
from trilane.utils.validation import read_text, require, require_file, shown
from trilane.workspace.prepared_corpora import (
    BUILT_IN,
    existing_pair,
    files,
    pair_of,
    require_prepared,
)

# megatron-core 0.16.1, core/datasets/indexed_dataset.py: magic, version, code of the token type,
# sequences, documents; then int32 lengths and int64 offsets of the sequences, and int64 documents.
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
SCANNED = 100_000_000  # ids, in under a second; the loader checks all
SOURCE = "data.source"
TOKENIZER = "data.tokenizer"
# Names that tokenizers give the token which ends a document; the first one present is taken.
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<EOS>")


def documents(source: str) -> Iterator[str]:
    """The texts of "stdlib", "mock", a text file, a JSONL file (field "text") or a folder of text
    files.
    """
    if source == "stdlib":
        return stdlib()
    if source == "mock":
        return mock()
    path = Path(source)
    require(path.exists(), SOURCE, source, "no such file or folder (known names: stdlib, mock)")
    if path.suffix == ".jsonl" and not path.is_dir():
        return jsonl(path)
    # A file is held in memory; larger corpora are .bin/.idx pairs.
    return (read_text(file, SOURCE, 1 << 36) for file in files(path))


def stdlib() -> Iterator[str]:
    """The modules of Python's standard library, without its packages, a document per file, up to
    BUILT_IN["stdlib"].
    """
    taken = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        taken += len(text)
        if taken > BUILT_IN["stdlib"]:
            return
        yield text


def mock() -> Iterator[str]:
    """Learnable synthetic text, the same on every machine: the multiples of 1 to 400."""
    for factor in range(1, 401):
        yield " ".join(str(factor * number) for number in range(400))


def jsonl(path: Path) -> Iterator[str]:
    """The field "text" of each line; only a line feed ends a line, since JSON may hold Unicode's
    other line ends.
    """
    require_file(SOURCE, path)
    with path.open("rb") as file:  # a line at a time: it may be larger than the memory
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                text.encode()  # half a surrogate pair is valid JSON, and no text
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                rule = 'each line must be {"text": "..."} in UTF-8'
                raise ValueError(f"{SOURCE}={path}:{number}: {rule}") from None
            yield text


@frozen
class Tokenizer:
    """`vocab_size` ids, `eod`, whose text is `end`, closes each document, `digest` identifies it.

    The first three names, and unique_identifiers, are the interface of megatron-core's GPT dataset.
    """

    name: str
    vocab_size: int
    eod: int
    end: str = "<|endoftext|>"
    digest: str
    coder: Any = field(default=None, repr=False)

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What distinguishes this tokenizer in megatron-core's index cache."""
        return {"tokenizer": self.name, "digest": self.digest}

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document, int32, including its end; ValueError where a word has no id."""
        if self.coder is None:
            ids: Any = np.frombuffer(text.encode(), np.uint8)
        else:
            with _refused(self.name, "cannot encode a document"):
                ids = self.coder.encode(text).ids
        return np.append(np.asarray(ids, np.int32), np.int32(self.eod))


@contextlib.contextmanager
def _refused(name: str, rule: str) -> Iterator[None]:
    """What the tokenizers library raises, as ValueError: a plain Exception, or a panic, which is a
    BaseException.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{TOKENIZER}={shown(name)}: {rule} ({shown(error)})") from None


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or the one in the folder `name`, which neither truncates nor pads a
    document.
    """
    if name == "bytes":
        return Tokenizer(name=name, vocab_size=257, eod=256, digest="bytes-257")
    path = Path(name) / "tokenizer.json"
    rule = "no folder with a tokenizer.json (known name: bytes)"
    require(path.is_file(), TOKENIZER, name, rule)
    size = path.stat().st_size
    require(size <= 1 << 26, TOKENIZER, path, f"has {size} bytes; at most {1 << 26} are read")
    content = path.read_bytes()
    from tokenizers import Tokenizer as Coder

    with _refused(name, "tokenizer.json cannot be read"):
        coder = Coder.from_buffer(content)
    coder.no_truncation()
    coder.no_padding()
    # A vocabulary may have gaps: the largest id counts, not the number of words.
    ids = max(coder.get_vocab().values()) + 1
    digest = hashlib.sha256(content).hexdigest()[:16]
    for end in ENDS:
        eod = coder.token_to_id(end)
        if eod is not None:
            return Tokenizer(
                name=name, vocab_size=ids, eod=eod, end=end, digest=digest, coder=coder
            )
    rule = f"has none of the end-of-document tokens {', '.join(ENDS)}"
    raise ValueError(f"{TOKENIZER}={shown(name)}: {rule}")


def write_pair(arrays: Iterable[np.ndarray], prefix: str, vocabulary: int) -> None:
    """Write one document per array of token ids, by megatron-core's builder, whose import takes
    seconds.
    """
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder: Any = IndexedDatasetBuilder(f"{prefix}.bin", DType.optimal_dtype(vocabulary))
    for ids in arrays:
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def check_pair(prefix: str) -> tuple[np.ndarray, int]:
    """(length of each sequence, largest id of the first SCANNED) of the pair; checks that header
    and sizes agree.

    Raises ValueError where a file is missing, is no index, is truncated, or `.idx` describes
    something else than `.bin` holds: megatron-core would fail an assertion, or read beyond the end.
    """
    index = Path(f"{prefix}.idx")
    data = Path(f"{prefix}.bin")
    for path in (index, data):
        require(path.is_file(), SOURCE, path, "is missing from the .bin/.idx pair")
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    is_index = len(head) == HEADER.size and head.startswith(MAGIC)
    require(is_index, SOURCE, index, "is not a Megatron index")
    _, version, code, sequences, documents = HEADER.unpack(head)
    rule = f"has unknown version {version} or type {code}"
    require(version == 1 and code in DTYPES, SOURCE, index, rule)
    _require_bytes(index, HEADER.size + sequences * 12 + documents * 8, "header")
    require(sequences > 0 and documents > 0, SOURCE, prefix, "is empty")
    lengths = np.memmap(index, np.int32, "r", HEADER.size, (sequences,))
    starts = np.memmap(index, np.int64, "r", HEADER.size + 4 * sequences, (sequences,))
    ends = np.memmap(index, np.int64, "r", HEADER.size + 12 * sequences, (documents,))
    item = np.dtype(DTYPES[code]).itemsize
    tokens = int(lengths.sum(dtype=np.int64))
    require(tokens > 0, SOURCE, prefix, "is empty")
    size = _require_bytes(data, tokens * item, "index")
    # 8 bytes a sequence in memory
    places = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * item])
    is_dense = bool(lengths.min() >= 0) and np.array_equal(starts, places)
    require(is_dense, SOURCE, index, "has sequences that do not follow one another in its .bin")
    # megatron-core takes the document boundaries from here, and would read sequences that do not
    # exist
    rule = f"has documents of {ends[-1]} sequences, and {sequences} in all"
    require(ends[-1] == sequences, SOURCE, index, rule)
    ids = np.memmap(data, DTYPES[code], "r", 0, (size // item,))[:SCANNED]
    require(ids.min() >= 0, SOURCE, data, f"holds the negative token {ids.min()}")
    return lengths, int(ids.max())


def _require_bytes(path: Path, least: int, part: str) -> int:
    """The size of a file; ValueError where it is less than its `part` requires."""
    size = path.stat().st_size
    rule = f"is truncated: {size} bytes, its {part} requires {least}"
    require(size >= least, SOURCE, path, rule)
    return size


def prepare(data: Data, shape: ModelShape) -> str:
    """The prefix of the .bin/.idx pair of `data`, made unless it exists; safe to call concurrently.

    An existing pair given as source is checked and used as it is; no tokenizer is read for it.
    Raises ValueError, one line, where the source is missing, empty, not UTF-8, shorter than one
    sample of `shape`, truncated, or has ids beyond the vocabulary, or where data.split leaves less
    than a sample.
    """
    prefix = existing_pair(data.source)
    if not prefix:
        coder = tokenizer(data.tokenizer)
        rule = f"tokenizer {shown(coder.name)} has {coder.vocab_size} ids; pad the vocabulary up"
        require(coder.vocab_size <= shape.vocab_size, "vocab_size", shape.vocab_size, rule)
        prefix = _prepared(data, coder)
    lengths, largest = check_pair(prefix)
    needed = shape.seq_length + 1
    tokens = int(lengths.sum(dtype=np.int64))
    rule = f"has {tokens} tokens, one sample needs {needed}"
    require(tokens >= needed, SOURCE, data.source, rule)
    rule = f"holds token {largest}, the vocabulary ends before vocab_size={shape.vocab_size}"
    require(largest < shape.vocab_size, SOURCE, data.source, rule)
    # The shares are cut at whole documents, as megatron-core cuts them.
    training, validation, _ = data.shares
    for name, begin, share in (("training", 0.0, training), ("validation", training, validation)):
        part = lengths[round(begin * len(lengths)) : round((begin + share) * len(lengths))]
        tokens = int(part.sum(dtype=np.int64))
        rule = f"leaves {tokens} tokens of {data.source} for {name}; a sample needs {needed}"
        require(share == 0 or tokens >= needed, "data.split", data.split, rule)
    return prefix


def prepare_all(data: Data, shape: ModelShape) -> list[str]:
    """The prefixes of all sources of `data`, in order: one, or those of its blend; raises
    ValueError as prepare().
    """
    return [prepare(part, shape) for part in data.parts]


def _prepared(data: Data, coder: Tokenizer) -> str:
    """The pair in data.folder with the source's documents, written unless it exists; the .idx comes
    last.
    """
    texts = documents(data.source)
    prefix = pair_of(data)
    temporary = f"{prefix}.{secrets.token_hex(6)}"
    Path(data.folder).mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{prefix}.lock")):
        if Path(f"{prefix}.idx").is_file():
            return prefix
        try:
            write_pair((coder.encode(text) for text in texts if text), temporary, coder.vocab_size)
            size = Path(f"{temporary}.bin").stat().st_size
            require(size > 0, SOURCE, data.source, "is empty")
            os.replace(f"{temporary}.bin", f"{prefix}.bin")
            os.replace(f"{temporary}.idx", f"{prefix}.idx")
        finally:
            Path(f"{temporary}.bin").unlink(missing_ok=True)
            Path(f"{temporary}.idx").unlink(missing_ok=True)
    return prefix


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is released with the process that holds it."""
    lock = FolderLock([path.parent], path.name, "data.folder")
    with lock.held(7 * 86400.0):  # a large corpus takes hours
        yield


def main(argv: list[str]) -> int:
    """Prepare the data of the plan in the last argument, print the prefixes; 2 and one line where
    that fails.
    """
    try:
        plan = read_plan(argv[-1])
        if "--in-job" in argv:
            require_prepared(plan.data.parts)
        if shows_gpu():  # here, before any process starts
            from trilane_engine.world import own_device

            own_device(plan.topology.precision)
        print(*prepare_all(plan.data, plan.shape), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
