"""The lines of a log file: plain, complete or being written, or gzip."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from trilane.utils.validation import require, require_file

HEAD = 1 << 16  # bytes that show whether it is a log
UNPACKED = 1 << 30  # bytes that any gzip file may hold
MAX_RATIO = 200  # and what a larger one may relative to its size
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
CONTROLS = bytes({*range(1, 32), 127} - set(b"\t\n\r\x0b\x0c\x1b\x08\x07"))
MAX_CONTROLS = 1 / 50  # of a log's bytes


def lines(path: Path) -> Iterator[bytes]:
    """The lines of `path` with their ends, of which only the last may lack one.

    Raises ValueError for a missing, empty or binary file, and for a gzip file that is damaged or
    cut.
    """
    require_file("log", path)
    left = max(UNPACKED, MAX_RATIO * path.stat().st_size)
    with path.open("rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if is_packed else raw
        try:
            head = file.read1(HEAD)
            require(len(head) > 0, "log", path, "is empty")
            odd = len(head) - len(head.translate(None, CONTROLS))
            require(odd <= MAX_CONTROLS * len(head), "log", path, "is a binary file, not a log")
            file.seek(0)
            while line := file.readline(MAX_LINE):
                left -= len(line)
                if left < 0:
                    rule = f"unpacks to more than {MAX_RATIO} times its size, as no log does"
                    raise ValueError(f"log={path}: {rule}")
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"log={path}: a damaged gzip file ({error})") from None
