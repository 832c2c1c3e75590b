"""Tape: numbers in a file, their end in memory: columns of long logs that only a CSV file will need."""

import tempfile
import weakref
from array import array
from pathlib import Path

import numpy as np

TAIL = 1 << 14  # numbers at the end that stay in memory: only they are changed


class SpilledColumn:
    """As an array of floats, whose beginning lies in a nameless file of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 it lives as long as the tape
        weakref.finalize(self, self._file.close)
        self._written, self._tail = 0, array("d")

    def append(self, value: float) -> None:
        """One number more."""
        self._tail.append(value)
        self._write()

    def frombytes(self, numbers: bytes) -> None:
        """Many numbers more, as float64."""
        self._tail.frombytes(numbers)
        self._write()

    def __getitem__(self, place: int) -> float:
        at = place if place >= 0 else self._written + len(self._tail) + place
        return self._tail[at - self._written] if at >= self._written else float(self.read(at, at + 1)[0])

    def __setitem__(self, place: int, value: float) -> None:
        if place >= self._written:
            self._tail[place - self._written] = value
        else:
            self._file.seek(8 * place)
            self._file.write(np.float64(value).tobytes())

    def read(self, start: int, stop: int) -> np.ndarray:
        """The numbers from `start` up to `stop`."""
        self._file.seek(8 * start)
        count = max(0, min(stop, self._written) - start)
        early = np.frombuffer(self._file.read(8 * count))
        late = self._tail[max(0, start - self._written) : max(0, stop - self._written)]
        return np.concatenate([early, np.array(late, np.float64)])

    def _write(self) -> None:
        if len(self._tail) >= 2 * TAIL:
            self._file.seek(8 * self._written)
            self._file.write(self._tail[:-TAIL].tobytes())
            self._written += len(self._tail) - TAIL
            del self._tail[:-TAIL]
