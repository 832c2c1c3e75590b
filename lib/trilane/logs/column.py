"""Growing columns of at most 8 bytes a number, in memory or, where a log is long, in files."""

import tempfile
import weakref
from array import array
from pathlib import Path

import numpy as np

NAN = float("nan")
TAIL = 1 << 14  # numbers at the end of a spilled column that stay in memory: only they are changed often


class SpilledColumn:
    """A growing array of floats; all but its tail is in an unnamed file of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 it lives as long as the column
        weakref.finalize(self, self._file.close)
        self._written, self._tail = 0, array("d")

    def append(self, value: float) -> None:
        self._tail.append(value)
        self._write()

    def frombytes(self, numbers: bytes) -> None:
        """Append numbers, given as the bytes of float64."""
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


class Column:
    """A growing column, in memory or in `spill`. While all its numbers are equal, only one is stored."""

    def __init__(self, rows: int, spill: SpilledColumn | None = None) -> None:
        self.rows, self._same, self._spill, self.is_spilled = rows, NAN, spill, spill is not None
        self._all: array[float] | SpilledColumn | None = None
        if not rows:
            self._expand()

    def append(self, value: float) -> None:
        if self._all is None and not (value == self._same or (value != value and self._same != self._same)):
            self._expand()
        if self._all is not None:
            self._all.append(value)
        self.rows += 1

    def extend(self, values: np.ndarray) -> None:
        if not self.rows and len(values):
            self._same, self._all = float(values[0]), None
        if self._all is None:
            same = values == self._same if self._same == self._same else values != values
            if not same.all():
                self._expand()
        if self._all is not None:
            self._all.frombytes(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        self.rows += len(values)

    def __getitem__(self, place: int) -> float:
        return self._same if self._all is None else self._all[place]

    def __setitem__(self, place: int, value: float) -> None:
        if self._all is None:
            self._expand()
        assert self._all is not None
        self._all[place] = value

    def numbers(self) -> np.ndarray:
        """All numbers; a view where they are in memory, so append nothing while it is used."""
        if self._all is None:
            return np.broadcast_to(self._same, self.rows)  # takes no memory
        return np.frombuffer(self._all) if isinstance(self._all, array) else self.read(0, self.rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        if self._all is None:
            return np.full(stop - start, self._same)
        return self._all.read(start, stop) if isinstance(self._all, SpilledColumn) else np.array(self._all[start:stop])

    def _expand(self) -> None:
        if self._spill is None:
            self._all = array("d", [self._same]) * self.rows
            return
        self._all = self._spill
        for start in range(0, self.rows, TAIL):
            self._spill.frombytes(np.full(min(TAIL, self.rows - start), self._same).tobytes())
