"""A log file as blocks of whole lines: plain or gzip, complete, truncated or being written."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trilane.utils.validation import require, require_file

BLOCK = 1 << 21  # bytes read at once
UNPACKED, MAX_RATIO = (
    1 << 30,
    200,
)  # bytes that any gzip file may hold, and what a larger one may relative to its size
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends


def blocks(path: Path, notes: list[str] | None = None) -> Iterator[bytes]:
    """The bytes of `path`, cut after line ends; only the last block may end inside a line.

    A truncated gzip file is read as far as possible, which is added to `notes`. Leading zero bytes,
    left when a log is emptied while it is being written, are skipped. Raises ValueError for a
    missing, empty or binary file, for a damaged gzip file, and for one that becomes shorter while
    it is read: its blocks are of two logs.
    """
    require_file("log", path)
    with path.open("rb") as raw:
        rest, size, started = b"", 0, False
        for chunk in _chunks(raw, path, [] if notes is None else notes):
            size += len(chunk)
            data = chunk if started else chunk.lstrip(b"\0").removeprefix(codecs.BOM_UTF8)
            if data and not started:
                require(not is_binary(data[: 1 << 16]), "log", path, "is a binary file, not a log")
                started = True
            cut = data.rfind(b"\n") + 1
            if cut == 0 and len(rest) + len(data) < MAX_LINE:
                rest += data
                continue
            cut = cut or len(data)
            yield rest + data[:cut]
            rest = data[cut:]
        require(
            os.fstat(raw.fileno()).st_size >= raw.tell(),
            "log",
            path,
            "became shorter while it was read; read it again",
        )
        require(size > 0, "log", path, "is empty")
        require(started, "log", path, "is a binary file, not a log")
        if rest:
            yield rest


def _chunks(raw: BinaryIO, path: Path, notes: list[str]) -> Iterator[bytes]:
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    if not packed:
        yield from iter(lambda: raw.read(BLOCK), b"")
        return
    left = max(UNPACKED, MAX_RATIO * path.stat().st_size)
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            while block := file.read1(
                BLOCK
            ):  # read() loses what it unpacked before the end of a cut file
                left -= len(block)
                require(
                    left >= 0,
                    "log",
                    path,
                    f"unpacks to more than {MAX_RATIO} times its size, as no log does",
                )
                yield block
    except EOFError:
        notes.append(
            "the gzip file ends early (it was cut, or is still written): what came after is not known"
        )
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"log={path}: a damaged gzip file ({error})") from None


def is_binary(head: bytes) -> bool:
    """Whether over 2 % of the bytes are control characters, or most are zero; but for holes, which
    file systems leave in a log whose node died.
    """
    text = re.sub(rb"\0{64,}", b"", head)
    control = bytes({*range(1, 32)} - set(b"\t\n\r\x0b\x0c\x1b\x08\x07")) + b"\x7f"
    odd = len(text) - len(text.translate(None, control))
    return odd > len(text) // 50 or text.count(b"\0") > len(text) // 2 or (bool(head) and not text)
