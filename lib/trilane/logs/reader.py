"""A log file as blocks of whole lines, in constant memory (plain or gzip, complete, truncated or being written); and
Reader: blocks in, runs out. Lines of a known form are read in bulk, others that may matter one by one.
"""

import re
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trilane.logs import endings
from trilane.logs.fixed_width import Forms, MergedLines, by_iteration, merge
from trilane.logs.lines import Lines
from trilane.logs.partial_run import PartialRun
from trilane.logs.prefilter import ALL, MAYBE, STEP, LineCache
from trilane.logs.table import NAN
from trilane.utils.validation import require, require_file

BLOCK = 1 << 21  # bytes read at once: fits the cache of a core, and holds thousands of lines
MOST_CANDIDATES = 1000  # lines that hold the number of an iteration and are read to see whether they are its line
CLOCKED = 32  # lines of those read at once whose time stamps are noted
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
                require(not is_binary(data[: 1 << 16]), "log", path, "is a binary file, not a log")
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


def is_binary(head: bytes) -> bool:
    """Whether over 2 % of the bytes are control characters, or most are zero."""
    odd = len(head) - len(head.translate(None, CONTROL))
    return odd > len(head) // 50 or head.count(b"\0") > len(head) // 2


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run. `keep` and `spill` as in NumericTable."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._lines, self._before = Lines(keep, spill), 0  # the lines before the block
        self._forms, self._cache = Forms(), LineCache(self._lines.tables.words)

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts, stops = np.concatenate([[0], ends + 1]), np.append(ends, len(block))
        # what follows the last line end may be truncated, which no form shows
        batches, rest = self._forms.batches(block, starts[:-1], stops[:-1])
        kinds = self._cache.kinds(block, rest)
        new = self._forms.learn(block, starts, stops, rest[kinds & STEP > 0])
        if new:
            left = ~np.isin(rest, np.concatenate([b.at for b in new]))
            rest, kinds = rest[left], kinds[left]
        batches += new
        steps = merge([b for b in batches if b.form.kind == "iteration"])
        timers = merge([b for b in batches if b.form.kind == "timers"])
        lines, last = self._lines, len(starts) - 1
        for number, kind in self._relevant([*rest.tolist(), last], np.append(kinds, np.uint8(ALL))):
            line = block[starts[number] : stops[number]]
            if (kind == MAYBE and not lines.facts.inside) or (line in lines.facts.seen and not lines.pending):
                continue
            if min(steps.first, timers.first) < number:
                steps, timers = self._flush(number, steps, timers, block, starts, stops)
            lines.number = self._before + number + 1
            if not lines.read(line, kind, whole=number < last):
                self._cache.add(line)
        self._flush(last + 1, steps, timers, block, starts, stops)
        self._before += last

    def runs(self) -> list[PartialRun]:
        """The runs read so far, which grow; a line that the next may continue is not in them yet."""
        return [run for run in self._lines.runs if run.has_content]

    def _relevant(self, rest: list[int], kinds: np.ndarray) -> Iterator[tuple[int, int]]:
        """Index and kind of the lines that may matter, and of every line while one before it is incomplete."""
        relevant, kind, at, place = np.flatnonzero(kinds).tolist(), kinds.tolist(), 0, 0
        while place < len(relevant):
            at = at if self._lines.pending else max(at, relevant[place])
            yield rest[at], kind[at]
            at += 1
            while place < len(relevant) and relevant[place] < at:
                place += 1

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        return self._lines.close()

    def _flush(
        self, before: int, steps: MergedLines, timers: MergedLines, block: bytes, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[MergedLines, MergedLines]:
        """Pass on the bulk lines before the line `before`; returns the rest."""
        (now, steps), (timed, timers) = steps.split(before), timers.split(before)
        if not len(now.at) and not len(timed.at):
            return steps, timers
        lines = self._lines
        lines.finish()
        first = lines.run.iteration
        places = np.unique(np.linspace(0, len(now.at) - 1, CLOCKED).astype(int)).tolist() if len(now.at) else []
        seen = [(p, block[starts[i] : stops[i]], self._before + int(i) + 1) for p in places for i in now.at[[p]]]
        if not len(now.at) or lines.extend(now, seen):
            iterations = np.concatenate([[first], now.values[0] if len(now.at) else []])
            at, values = by_iteration(timed, iterations[np.searchsorted(now.at, timed.at)])
            lines.run.add_timers(timed.names, at, values)
        else:  # the iterations do not simply increase: another run begins, or several ranks print
            for number in np.sort(np.concatenate([now.at, timed.at])).tolist():
                lines.number = self._before + number + 1
                lines.read(block[starts[number] : stops[number]], ALL, whole=True)
                lines.finish()
        return steps, timers


def find_lines(path: Path, numbers: Collection[int], first: int = 1, last: int = 0) -> dict[int, tuple[int, str]]:
    """Number and text of the line of each of these iterations, where one line alone shows it, from the line `first` to
    `last` (counted from 1; 0: to the end).
    """
    written = b"|".join(b"%d|%s" % (n, f"{n:,}".encode()) for n in sorted(numbers))
    word = re.compile(rb"(?<![\d.,])(?:" + written + rb")(?![\d.])")
    found, number, left = dict[int, tuple[int, str]](), 1, MOST_CANDIDATES
    for block in blocks(path):
        at, counted = 0, 0
        while left and len(found) < len(numbers) and (hit := word.search(block, at)):
            start, stop = block.rfind(b"\n", 0, hit.start()) + 1, block.find(b"\n", hit.end())
            number, counted = number + block.count(b"\n", counted, start), start
            at = stop if stop >= 0 else len(block)
            if number >= first:
                left, text = left - 1, block[start:at]
                if (at_line := _iteration(text)) in numbers:
                    found.setdefault(int(at_line), (number, endings.text(text)))
        number += block.count(b"\n", counted)
        if not left or len(found) == len(numbers) or number > last > 0:
            break
    return found


def _iteration(line: bytes) -> float:
    """The number of the iteration that the line alone shows, NaN for another line."""
    reader = Reader()
    reader.feed(line + b"\n")
    return next((run.iteration for run in reader.close() if run.rows), NAN)
