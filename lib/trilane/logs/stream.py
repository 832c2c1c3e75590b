"""From a file to blocks of whole lines, in constant memory: plain or gzip, cut off, being written, or refused."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trilane.utils.validation import require

BLOCK = 1 << 21  # bytes read at once: fits a core's cache and holds some thousand lines
LONGEST = 1 << 24  # bytes: a longer line is cut in pieces, so that a file without line ends stays bounded
CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x08\x07\x00")) + b"\x7f"


def blocks(path: Path) -> Iterator[bytes]:
    """The bytes of `path`, cut after line ends; only the last block may end inside a line.

    A gzip file that is cut off is read as far as it goes. Zero bytes in front, as a log has that was emptied under its
    writer, are left out. Raises ValueError for a missing, empty or binary file, and for a damaged gzip file.
    """
    require(path.is_file(), "log", path, "no such file")
    with path.open("rb") as raw:
        rest, size, begun = b"", 0, False
        for chunk in _chunks(raw, path):
            size += len(chunk)
            data = chunk if begun else chunk.lstrip(b"\0")
            if data and not begun:
                require(not _is_binary(data[: 1 << 16]), "log", path, "is a binary file, not a log")
                begun = True
            cut = data.rfind(b"\n") + 1
            if cut == 0 and len(rest) + len(data) < LONGEST:
                rest += data
                continue
            cut = cut or len(data)
            yield rest + data[:cut]
            rest = data[cut:]
        require(size > 0, "log", path, "is empty")
        require(begun, "log", path, "is a binary file, not a log")
        if rest:
            yield rest


def _chunks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    data = raw.read(BLOCK)
    if not packed:
        while data:
            yield data
            data = raw.read(BLOCK)
        return
    unpack = zlib.decompressobj(wbits=31)
    while data:
        try:
            yield unpack.decompress(data, BLOCK)
        except zlib.error as error:
            raise ValueError(f"log={path}: a damaged gzip file ({error})") from None
        data = unpack.unconsumed_tail or unpack.unused_data.lstrip(b"\0")
        if unpack.eof and data:  # members stand one behind the other
            unpack = zlib.decompressobj(wbits=31)
        data = data or raw.read(BLOCK)


def _is_binary(head: bytes) -> bool:
    """More than one byte in fifty that no text holds, or mostly zeros."""
    odd = len(head) - len(head.translate(None, CONTROL))
    return odd > len(head) // 50 or head.count(b"\0") > len(head) // 2
