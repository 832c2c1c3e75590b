"""A log file as blocks of whole lines, in constant memory (plain or gzip, complete, truncated or being written); and
Reader: blocks in, runs out. Lines of a known form are read in bulk, others that may matter one by one.
"""

import codecs
import os
import re
import zlib
from collections.abc import Collection, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trilane.logs import endings
from trilane.logs.dialects.megatron import rank
from trilane.logs.dialects.trainers import timestamp
from trilane.logs.reading.forms import Forms
from trilane.logs.reading.lines import Lines
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.prefilter import ALL, MAYBE
from trilane.logs.reading.sorted_lines import SortedLines, by_iteration
from trilane.logs.reading.table_lines import MEMORY
from trilane.logs.table import NAN
from trilane.utils.validation import require, require_file

FEW = 4  # iterations, which are added one by one
BLOCK = 1 << 21  # bytes read at once: fits the cache of a core, and holds thousands of lines
MOST_CANDIDATES = 1000  # lines that hold the number of an iteration and are read to see whether they are its line
CLOCKED = 16  # lines of those read at once whose time stamps are noted
PACKED = 1 << 16  # of a gzip file, whose members, however small, are each cut off the rest of what was read
UNPACKED, MAX_RATIO = 1 << 30, 200  # bytes that any gzip file may hold, and what a larger one may relative to its size
CUT_NOTE = "the gzip file ends early (it was cut, or is still written): what came after is not known"
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
HOLE = re.compile(rb"\0{64,}")
CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x08\x07\x00")) + b"\x7f"


def blocks(path: Path, notes: list[str] | None = None) -> Iterator[bytes]:
    """The bytes of `path`, cut after line ends; only the last block may end inside a line.

    A truncated gzip file is read as far as possible, which is added to `notes`; UTF-16 as UTF-8. Leading zero bytes,
    left when a log is emptied while it is being written, are skipped. Raises ValueError for a missing, empty or binary
    file, for a damaged gzip file, and for one that becomes shorter while it is read: its blocks are of two logs.
    """
    require_file("log", path)
    with path.open("rb") as raw:
        rest, size, started = b"", 0, False
        for chunk in _as_utf8(_chunks(raw, path, [] if notes is None else notes)):
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
        require(
            os.fstat(raw.fileno()).st_size >= raw.tell(), "log", path, "became shorter while it was read; read it again"
        )
        require(size > 0, "log", path, "is empty")
        require(started, "log", path, "is a binary file, not a log")
        if rest:
            yield rest


def _chunks(raw: BinaryIO, path: Path, notes: list[str]) -> Iterator[bytes]:
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
    if not unpack.eof:
        notes.append(CUT_NOTE)


def _as_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks without a byte order mark, those of UTF-16 (with a mark, or of Latin text) converted."""
    first = next(chunks, b"")
    marked, most = first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), len(first) // 2
    zeros = [first[start::2].count(b"\0") for start in (0, 1)]
    if marked or (sum(zeros) >= 0.9 * most > 0 and min(zeros) <= 0.02 * most):
        name = "utf-16" if marked else "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
        decoder = codecs.getincrementaldecoder(name)("replace")
        for chunk in chain([first], chunks):
            yield decoder.decode(chunk).encode("utf-8", "replace")
        return
    yield from chain([first.removeprefix(codecs.BOM_UTF8)], chunks)


def is_binary(head: bytes) -> bool:
    """Whether over 2 % of the bytes are control characters, or most are zero; but for holes, which file systems leave
    in a log whose node died."""
    text = HOLE.sub(b"", head)
    odd = len(text) - len(text.translate(None, CONTROL))
    return odd > len(text) // 50 or text.count(b"\0") > len(text) // 2 or (bool(head) and not text)


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run. `keep` and `spill` as in NumericTable."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._lines, self._before = Lines(keep, spill), 0  # the lines before the block
        self._forms = Forms(self._lines.tables)

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        return self._lines.close()

    def runs(self) -> list[PartialRun]:
        """The runs read so far, which grow; a line that the next may continue is not in them yet."""
        return [run for run in self._lines.runs if run.has_content]

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        found, lines, at = SortedLines(block, self._forms), self._lines, 0
        for number in (*found.alone, found.whole):
            while lines.pending and at < number:
                at = self._read(found, at)
            if at <= number and self._matters(found, number):
                self._add(found, at, number)
                at = self._read(found, number)
        self._before += found.whole

    def _matters(self, found: SortedLines, number: int) -> bool:
        lines = self._lines
        if number == found.whole or lines.pending:
            return True
        if lines.facts.repeat(found.texts[number], lines.run) or self._forms.holds_nothing(found.shapes[number]):
            return False
        return lines.facts.inside or found.kind(number) != MAYBE

    def _read(self, found: SortedLines, number: int) -> int:
        """Read one line; returns the index of the next."""
        lines, text, whole = self._lines, found.texts[number], number < found.whole
        lines.number = self._before + number + 1
        if whole and lines.in_block and self._forms.holds_nothing(found.shapes[number]):
            lines.read(text, 0, whole)
        elif whole and not lines.read(text, found.kind(number), whole):
            self._forms.add_nothing(found.shapes[number])
        elif text and not whole:  # what follows the last line end may be truncated
            rows = lines.run.rows
            lines.read(text, ALL, whole)
            lines.run.bare = [bare for bare in lines.run.bare if bare[0] < rows]  # it may have lost its other numbers
        return number + 1

    def _add(self, found: SortedLines, start: int, stop: int) -> None:
        """Add the lines of known forms from `start` to before `stop`, in pieces whose iterations rise."""
        steps = found.steps
        if not found.has(start, stop):
            return
        part = steps.between(start, stop)
        places = [steps.at[part.start], *(c for c in found.cuts if start < c < stop)] if part.start < part.stop else []
        for low, high in pairwise([start, *(place for place in places if place > start), stop]):
            self._add_piece(found, low, high)

    def _add_piece(self, found: SortedLines, low: int, high: int) -> None:
        steps, lines, last = found.steps, self._lines, self._lines.run.iteration
        part = steps.between(low, high)
        if part.stop - part.start < FEW or not self._extend(found, part):
            for place in range(part.start, part.stop):
                if place == part.start + 1 and self._extend(found, slice(place, part.stop)):
                    break  # the first one began another run
                self._step(found, place)
        timers, deepspeed = found.timers.between(low, high), found.deepspeed.between(low, high)
        if timers.start < timers.stop:
            numbers = np.concatenate([[last], steps.column("iteration", part)])
            at = np.searchsorted(steps.at[part], found.timers.at[timers])
            lines.run.add_timers(found.timers.names, *by_iteration(found.timers.values[:, timers], numbers[at]))
        if deepspeed.start < deepspeed.stop:
            self._add_deepspeed(found, deepspeed)
        held_out = found.validation.between(low, high)
        for place in range(held_out.start, held_out.stop):
            lines.run.add_validation(found.validation.row(place))

    def _extend(self, found: SortedLines, part: slice) -> bool:
        count, at = part.stop - part.start, found.steps.at
        places = sorted({place * (count - 1) // (CLOCKED - 1) for place in range(CLOCKED)})
        seen = [(p, found.texts[at[part.start + p]], self._before + at[part.start + p] + 1) for p in places]
        return count >= FEW and self._lines.extend(found.steps, part, found.form(part.start), seen)

    def _step(self, found: SortedLines, place: int) -> None:
        """Add an iteration on its own: another rank's copy, or one that begins a run."""
        row, number, form = found.steps.row(place), found.steps.at[place], found.form(place)
        # a loss that is printed as NaN is no loss that is missing
        row = {span.column: NAN for span in form.spans if span.column == "lm_loss"} | row
        source, text = row.pop("_source", NAN), found.texts[number]
        row = {name: value for name, value in row.items() if name[0] != "_"}
        if form.first_iteration is None:
            self._lines.step(row, form.dialect, source, text, self._before + number + 1)
        else:
            time_s = row.get("time_s", NAN if "sec_per_it" in row else timestamp(text))
            self._lines.tables.step(row, time_s, form.dialect, form.first_iteration, text, self._before + number + 1)

    def _add_deepspeed(self, found: SortedLines, part: slice) -> None:
        """Add DeepSpeed's lines: their memory, and their steps where nothing else numbers the iterations."""
        lines, rows = self._lines, found.deepspeed
        # step 0 is printed at start-up
        if any((rows.column(name, part) > 0).any() for name in ("iteration", "since_start")):
            lines.tables.settle("deepspeed")
            lines.run.dialects["deepspeed"] += 0
        if lines.run.iterations.rows and "skipped_total" in rows.names:
            lines.run.skipped_so_far(float(rows.column("skipped_total", part)[-1]))
        for place in range(part.start, part.stop) if not lines.run.iterations.rows else ():
            row, number = rows.row(place), rows.at[place]
            lines.number = self._before + number + 1
            lines.deepspeed({name: value for name, value in row.items() if name not in MEMORY}, found.texts[number])
        held = {name: rows.column(name, part) for name in MEMORY if name in rows.names}
        lines.run.add_memories(held, rank(found.texts[rows.at[part.stop - 1]]), lines.run.iteration)


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
