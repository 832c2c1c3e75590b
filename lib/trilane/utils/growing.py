"""A file that other processes write, read while it grows: every byte once, in whole lines."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 21  # bytes read at once
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
BEFORE = 64  # bytes before the place reached, by which a file is known to be the same


class Growing:
    """The whole lines that are added to a file, which may not exist yet, be truncated, or be replaced by another.

    `beginnings` counts how often it began anew. The file is opened at each call: on NFS only this asks the server for
    what other hosts added. A file that is replaced is first read to its end, if it still is in its folder under a name
    that begins alike, as programs that rotate logs leave it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.beginnings, self.rest = path, 0, b""
        self._file, self._offset, self._before, self._begun = (0, 0), 0, b"", False

    def blocks(self) -> Iterator[bytes]:
        """What was added since the last call, in blocks of whole lines; nothing while there is no such file."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            state = os.fstat(file.fileno())
            number = state.st_dev, state.st_ino
            if self._file not in ((0, 0), number):
                yield from self._rotated()
                yield from self._begin()
            elif self._offset:
                file.seek(self._offset - len(self._before))
                if file.read(len(self._before)) != self._before:
                    yield from self._begin()
            self._file = number
            yield from self._added(file)

    def close(self) -> bytes:
        """The last line, if it has no end, which then counts as read."""
        rest, self.rest = self.rest, b""
        return rest

    def _begin(self) -> Iterator[bytes]:
        """Read from the start again; what has no line end will not get one."""
        if rest := self.close():
            yield rest + b"\n"
        self.beginnings += 1
        self._offset, self._before, self._begun = 0, b"", False

    def _rotated(self) -> Iterator[bytes]:
        """The end of the file that was read so far, under its new name."""
        for entry in os.scandir(self.path.parent):
            if entry.name.startswith(self.path.name) and entry.inode() == self._file[1] and entry.is_file():
                with open(entry.path, "rb") as file:
                    yield from self._added(file)

    def _added(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self._offset)
        while data := file.read(BLOCK):
            self._offset += len(data)
            self._before = (self._before + data)[-BEFORE:]
            # a file that was emptied while it was being written begins with bytes that are zero
            data = data if self._begun else data.lstrip(b"\0")
            self._begun |= bool(data)
            cut = data.rfind(b"\n") + 1
            if not cut and len(self.rest) + len(data) < MAX_LINE:
                self.rest += data
                continue
            cut = cut or len(data)
            whole, self.rest = self.rest + data[:cut], data[cut:]
            yield whole
