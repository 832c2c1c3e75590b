"""A file as blocks of whole lines, in constant memory: plain or gzip, complete, truncated or being written."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trilane.utils.validation import require, require_file

BLOCK = 1 << 21  # bytes read at once: fits the cache of a core, and holds thousands of lines
PACKED = 1 << 16  # of a gzip file, whose members, however small, are each cut off the rest of what was read
UNPACKED, MAX_RATIO = 1 << 30, 200  # bytes that any gzip file may hold, and what a larger one may relative to its size
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x08\x07\x00")) + b"\x7f"


def blocks(path: Path) -> Iterator[bytes]:
    """The bytes of `path`, cut after line ends; only the last block may end inside a line.

    A truncated gzip file is read as far as possible. Leading zero bytes, left when a log is emptied while it is being
    written, are skipped. Raises ValueError for a missing, empty or binary file, and for a damaged gzip file.
    """
    require_file("log", path)
    with path.open("rb") as raw:
        rest, size, started = b"", 0, False
        for chunk in _chunks(raw, path):
            size += len(chunk)
            data = chunk if started else chunk.lstrip(b"\0")
            if data and not started:
                require(not _is_binary(data[: 1 << 16]), "log", path, "is a binary file, not a log")
                started = True
            cut = data.rfind(b"\n") + 1
            if cut == 0 and len(rest) + len(data) < MAX_LINE:
                rest += data
                continue
            cut = cut or len(data)
            yield rest + data[:cut]
            rest = data[cut:]
        require(size > 0, "log", path, "is empty")
        require(started, "log", path, "is a binary file, not a log")
        if rest:
            yield rest


def _chunks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    size = PACKED if packed else BLOCK
    data = raw.read(size)
    if not packed:
        while data:
            yield data
            data = raw.read(size)
        return
    unpack, left = zlib.decompressobj(wbits=31), max(UNPACKED, MAX_RATIO * path.stat().st_size)
    while data:
        try:
            block = unpack.decompress(data, BLOCK)
        except zlib.error as error:
            raise ValueError(f"log={path}: a damaged gzip file ({error})") from None
        left -= len(block)
        require(left >= 0, "log", path, f"unpacks to more than {MAX_RATIO} times its size, as no log does")
        yield block
        data = unpack.unconsumed_tail or unpack.unused_data.lstrip(b"\0")
        if unpack.eof and data:  # several members follow each other
            unpack = zlib.decompressobj(wbits=31)
        data = data or raw.read(size)


def _is_binary(head: bytes) -> bool:
    """Whether over 2 % of the bytes are control characters, or most are zero."""
    odd = len(head) - len(head.translate(None, CONTROL))
    return odd > len(head) // 50 or head.count(b"\0") > len(head) // 2
