"""A log file as blocks of whole lines: plain or gzip, complete, truncated or being written."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trilane.utils.validation import require, require_file

BLOCK = 1 << 21  # bytes read at once
HEAD = 1 << 16  # bytes that show whether it is a log
UNPACKED = 1 << 30  # bytes that any gzip file may hold
MAX_RATIO = 200  # and what a larger one may relative to its size
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
CONTROLS = bytes({*range(1, 32), 127} - set(b"\t\n\r\x0b\x0c\x1b\x08\x07"))
MAX_CONTROLS = 1 / 50  # of a log's bytes


def blocks(path: Path, notes: list[str]) -> Iterator[bytes]:
    """The bytes of `path`, cut after line ends; only the last block may end inside a line.

    A truncated gzip file is read as far as possible, which is added to `notes`. Leading zero bytes,
    left when a log is emptied while it is being written, are skipped. Raises ValueError for a
    missing, empty or binary file, and for a damaged gzip file.
    """
    require_file("log", path)
    with path.open("rb") as raw:
        rest = b""
        size = 0
        has_begun = False
        for chunk in _chunks(raw, path, notes):
            size += len(chunk)
            data = chunk
            if not has_begun:
                data = chunk.lstrip(b"\0").removeprefix(codecs.BOM_UTF8)
                head = data[:HEAD]
                odd = len(head) - len(head.translate(None, CONTROLS))
                is_text = odd <= MAX_CONTROLS * len(head)
                require(is_text, "log", path, "is a binary file, not a log")
                has_begun = bool(data)
            cut = data.rfind(b"\n") + 1
            if cut == 0 and len(rest) + len(data) < MAX_LINE:
                rest += data
                continue
            cut = cut or len(data)
            yield rest + data[:cut]
            rest = data[cut:]
        require(size > 0, "log", path, "is empty")
        require(has_begun, "log", path, "is a binary file, not a log")
        if rest:
            yield rest


def _chunks(raw: BinaryIO, path: Path, notes: list[str]) -> Iterator[bytes]:
    is_packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    if not is_packed:
        yield from iter(lambda: raw.read(BLOCK), b"")
        return
    left = max(UNPACKED, MAX_RATIO * path.stat().st_size)
    rule = f"unpacks to more than {MAX_RATIO} times its size, as no log does"
    try:
        with gzip.GzipFile(fileobj=raw) as file:
            # read() loses what it unpacked before the end of a cut file
            while block := file.read1(BLOCK):
                left -= len(block)
                require(left >= 0, "log", path, rule)
                yield block
    except EOFError:
        notes.append("the gzip file ends early (it was cut, or is still written)")
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"log={path}: a damaged gzip file ({error})") from None
