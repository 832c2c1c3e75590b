"""Megatron's .bin/.idx pair: written by megatron-core's builder, its sizes checked before megatron-core reads it."""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trilane.utils.validation import require

# megatron-core 0.16.1, core/datasets/indexed_dataset.py: magic, version, code of the token type, sequences, documents;
# then int32 lengths and int64 offsets of the sequences, and int64 documents.
MAGIC = b"MMIDIDX\x00\x00"


HEADER = struct.Struct("<9sQBQQ")


SCANNED_TOKENS = 100_000_000  # of a given pair, for ids beyond the vocabulary: under a second; the feed checks the rest


DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write_pair(documents: Iterable[np.ndarray], prefix: str, vocabulary: int) -> None:
    """Write one document per array of token ids; 16-bit where `vocabulary` allows, as Megatron's preprocessing does."""
    import torch

    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    for ids in documents:
        builder.add_item(torch.from_numpy(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def check_pair(prefix: str, largest_token: bool = False) -> tuple[int, int]:
    """Tokens in the pair, and the largest id if asked for (else 0), once header and sizes are found to agree.

    Raises ValueError where a file is missing, is no index, is truncated, or `.bin` is shorter than `.idx` says:
    megatron-core would answer with an assertion, or read beyond the end.
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
    require(size >= expected, "data.source", index, f"is truncated: {size} bytes, its header says {expected}")
    require(sequences > 0, "data.source", prefix, "is empty")
    tokens = int(np.memmap(index, np.int32, "r", HEADER.size, (sequences,)).sum(dtype=np.int64))
    needed, size = tokens * np.dtype(DTYPES[code]).itemsize, data.stat().st_size
    require(size >= needed, "data.source", data, f"is truncated: {size} bytes, its index says {needed}")
    require(tokens > 0, "data.source", prefix, "is empty")
    largest = int(np.memmap(data, DTYPES[code], "r")[:SCANNED_TOKENS].max()) if largest_token else 0
    return tokens, largest
