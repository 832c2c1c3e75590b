"""A log file as blocks of whole lines (plain or gzip, complete, truncated or being written); and Reader: blocks in,
runs out.

Programs pad or round their numbers, so a log has few *forms*, which are lines with every digit as 0. The first line of
a form is searched by all rules; where it is one iteration, or nothing, the others of its form are read by the places of
its numbers, or passed over.
"""

import codecs
import math
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from trilane.logs import arguments, endings
from trilane.logs.dialects.prefixes import NAN, PREFIX, STAMP, body, rank, source, timestamp
from trilane.logs.dialects.tables import Dialect, Span, dialects, row_of
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.partial_run import MEMORY, PartialRun
from trilane.logs.reading.run_facts import RunFacts, timers
from trilane.utils.validation import require, require_file

BLOCK = 1 << 21  # bytes read at once
UNPACKED, MAX_RATIO = 1 << 30, 200  # bytes that any gzip file may hold, and what a larger one may relative to its size
MAX_LINE = 1 << 24  # bytes: a longer line is cut, so that memory stays bounded without line ends
MAX_RUNS = 10_000  # of a file


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
    size = 1 << 16 if packed else BLOCK  # the members of a gzip file, however small, are each cut off what was read
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
        notes.append("the gzip file ends early (it was cut, or is still written): what came after is not known")


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
    text = re.sub(rb"\0{64,}", b"", head)
    control = bytes({*range(1, 32)} - set(b"\t\n\r\x0b\x0c\x1b\x08\x07")) + b"\x7f"
    odd = len(text) - len(text.translate(None, control))
    return odd > len(text) // 50 or text.count(b"\0") > len(text) // 2 or (bool(head) and not text)


DIGITS = bytes.maketrans(b"123456789", b"000000000")
REPORTERS = 0.05  # of a loss that two reporters print, such as a bar, which rounds it or averages it: relative
LONG = 1 << 16  # bytes: longer lines are searched for iterations only
FORM = 4096  # bytes of the longest line whose form is remembered
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
# between two states of a bar on one line: a carriage return, as `cat -v` writes it too, or nothing where it was dropped
REDRAWN = re.compile(rb"\r|\^M|(?<=\])(?=[^\[\]\r]{0,80}\b\d{1,3}%\|)", re.DOTALL)
# between two dicts with a loss each that a collector of logs, or who pasted them, put on one line
JOINED = re.compile(rb"(?<=\}),?\s{0,2}(?=\{['\"][^{}]{0,4000}\bloss['\"])")
# what begins a line of its own, which completes no iteration line that was wrapped
OTHER = re.compile(rb"^\s*(?:\[|time \(ms\)|\(min, max\)|-{4}|\+|validation |after \d+ iter|Effective |\{)")
EPOCHS = {"epochs_done": 0.0, "nth_epoch": 1.0}  # where iterations count in their epoch: the number of the first one


class Form:
    """Lines of one form: how they are read (`kind`), and for lines of numbers their places."""

    def __init__(
        self, kind: str, dialect: Dialect | None = None, line: bytes = b"", spans: Sequence[Span] = ()
    ) -> None:
        self.kind, self.dialect, self.name = kind, dialect, ""
        columns = [span.column for span in spans]
        once = [s for s in spans if columns.count(s.column) == 1]
        commas = {s.column for s in once if b"," in line[s.start : s.stop]}
        plain = [s for s in once if s.column not in commas]
        # itemgetter and map take all numbers of a line in a third of the time of a loop; it needs two places at least
        self._names = [s.column for s in plain]
        self._texts = itemgetter(*(slice(s.start, s.stop) for s in plain), slice(0), slice(0))
        self._scaled = [(s.column, s.multiplier, s.divisor) for s in plain if s[3:] != (1.0, 1.0)]
        self._commas = [s for s in once if s.column in commas]
        self._added = [s for s in spans if s not in once]
        absent = next(iter(dialect.absent.items()), None) if dialect else None
        self.absent = (absent[0], float(absent[1])) if absent else ("", NAN)
        self.memory = [column for column in MEMORY if column in columns]
        prefix = PREFIX.match(line)
        self._source = prefix.span(prefix.lastindex or 0) if prefix else (0, 0)
        self.is_rank = bool(prefix and (prefix.lastindex or 0) <= 4)
        stamp = None if {"sec_per_it", "time_s"} & {*columns} else STAMP.search(line, 0, FORM)
        self._stamp = stamp.span() if stamp else (0, 0)
        self._minute, self._day, self._passed = b"", NAN, 0  # of the last stamp

    def row(self, line: bytes) -> dict[str, float]:
        """The numbers of a line of this form."""
        row = dict(zip(self._names, map(float, self._texts(line)), strict=False))
        for column, multiplier, divisor in self._scaled:
            row[column] = row[column] * multiplier / divisor
        for column, start, stop, multiplier, divisor in self._commas:
            row[column] = float(line[start:stop].replace(b",", b"")) * multiplier / divisor
        return row | row_of(self._added, line) if self._added else row

    def source(self, line: bytes) -> float:
        """The number of the rank, process or host before the line; NaN without one."""
        start, stop = self._source
        return float(line[start:stop]) if stop else NAN

    def rank(self, line: bytes) -> float:
        """The rank before the line; NaN without one."""
        return self.source(line) if self.is_rank else NAN

    def time(self, line: bytes) -> float:
        """Seconds since 1970 by the line's time stamp; NaN without one."""
        start, stop = self._stamp
        if not stop:
            return NAN
        minute, seconds = line[start : start + 16], line[start + 17 : stop]
        if minute != self._minute:
            self._minute, self._day = minute, timestamp(minute[:10] + b" 00:00:00")
            self._passed = 3600 * int(minute[11:13]) + 60 * int(minute[14:])
        if minute[11:13] > b"23" or minute[14:] > b"59" or seconds[:2] > b"59":
            return NAN
        passed = self._passed + int(seconds[:2])
        return self._day + (passed + (float(b"0." + seconds[3:]) if len(seconds) > 3 else 0.0))


@dataclass
class Open:
    """An iteration that the next lines may continue: its row so far, its first line (of a wrapped one: all so far) and
    number, and how many lines it has."""

    dialect: Dialect
    row: dict[str, float]
    line: bytes
    number: int
    lines: int = 0


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run."""

    def __init__(self) -> None:
        every = dialects()
        self._tables = [d for d in every if not (d.fallback or d.companion)]
        self._fallbacks, self._companions = [d for d in every if d.fallback], [d for d in every if d.companion]
        self._words = [(word.encode(), dialect.name) for dialect in self._tables for word in dialect.words]
        self._guesses = {dialect.name for dialect in self._fallbacks}
        self._families = {name: d.family for d in every for name in d.family}
        self._all = [PartialRun()]
        self.number = 0  # of the current line in the file
        self._forms = dict[bytes, Form | None]()  # None: of lines that hold nothing
        self._launches = set[bytes]()  # forms of lines of the current run's launch
        self._open: Open | None = None
        self._facts, self._dicts = RunFacts(), trainer_dicts.TrainerDicts(self)
        self._waits = False  # whether the next line matters whatever it holds
        self._epochs: tuple[PartialRun, float] | None = None  # of a fallback: iterations of the run's earlier epochs

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self._all[-1]

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        self._finish()
        self._return_delayed()
        self._facts.close(self.run)
        for run in self._all:
            trainer_dicts.number_iterations(run)
        return [run for run in self._all if run.has_content]

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        *lines, rest = block.split(b"\n")
        unknown = Form("")
        known = self._forms.get
        for line in lines:
            self.number += 1
            if self._waits:
                self._line(line)
                continue
            form = known(line.translate(DIGITS), unknown)
            if form is unknown:
                self._learn(line)
            elif form is not None:
                self._apply(form, line)
        if rest:  # may be cut
            self.number += 1
            self._line(rest, whole=False)
            self.number -= 1

    def _learn(self, line: bytes) -> None:
        form = self._line(line)
        if len(line) <= FORM and not (form and form.kind == "alone"):
            if len(self._forms) > 50_000:  # the wording of a log changes
                self._forms.clear()
            self._forms[line.translate(DIGITS)] = form

    def _apply(self, form: Form, line: bytes) -> None:
        """Read a line of a known form."""
        kind, run, row = form.kind, self._all[-1], form.row(line)
        if kind == "iteration":
            assert form.dialect
            is_next = form.name and form.name == run.steady and row["iteration"] > run.iteration
            if is_next and row.get(form.absent[0]) != form.absent[1]:
                if "sec_per_it" not in row:
                    row = run.timed(row, row["time_s"] if "time_s" in row else form.time(line), form.name)
                printed = form.source(line)
                run.add(row, form.name, printed, line, self.number)
                if form.memory:
                    run.add_memory_of(row, form.memory, printed if form.is_rank else NAN)
            else:
                time_s, printed = form.time(line), form.source(line)
                self._take(row, form.dialect, form.name, time_s, printed, line, self.number, is_plain=True)
        elif kind == "timers":
            run.add_timers(row)
        elif kind == "step":
            self._companion(row, form, line)
        elif kind == "evaluation":
            run.add_validation({"iteration": run.iteration} | row)
        elif kind == "argument":
            self._facts.arguments(line, run)
        else:
            self._read_facts(line)

    def _line(self, line: bytes, whole: bool = True) -> Form | None:
        """Read one line by all rules, not `whole` if the file ends inside it. Returns its form, None where it holds
        nothing; one of the kind "alone" where other digits may make it another line, or it is of several parts."""
        text = line
        if b"\x1b" in line or b"\0" in line:
            text = ESCAPE.sub(b"", line).replace(b"\0", b"")
        text = text.rstrip(b"\r\n")
        parts = _parts(text)
        *forms, form = [self._part(part, whole or part is not parts[-1]) for part in parts]
        self._waits = bool(self._open or self._dicts.pending or self._facts.traceback)
        if form and form.kind == "iteration" and text is not line and text != line:
            return Form("alone")
        return Form("alone") if any(forms) or (forms and form) else form

    def _part(self, line: bytes, whole: bool) -> Form | None:
        """Read a line, or a part of one that a bar overwrote."""
        if self._dicts.pending and b"{'" not in line and body(line).strip():
            self._dicts.release(line)
        if self._open and self._continues(line):
            return Form("alone")
        held = {name for word, name in self._words if word in line}
        known = [dialect for dialect in self._tables if dialect.name in held or not dialect.words]
        form = self._iterations(known, line, whole) if known else None
        found = [self._steps(dialect, line) for dialect in self._companions if dialect.holds(line)]
        if form and b'"timers": {' in line:  # a line of steps.jsonl has both
            self.run.add_timers(row_of(timers(line), line))
            return Form("alone")
        if form or len(line) >= LONG:
            return Form("alone") if any(found) else form
        form = next(filter(None, found), None)
        matched = not all(dialect.is_blind for dialect in known)
        if b"{'" in line:
            matched = True
            self._dicts.read(line)
        elif (b"it/s" in line or b"s/it" in line) and (bar := trainer_dicts.bar(line)):
            matched, self._dicts.bar = True, bar
        if not self._dicts.pending and (guessed := self._guess(line, whole)):
            form = guessed
        if not matched and not form and (spans := timers(line)):
            form = Form("timers", None, line, spans)
        is_argument, others, end = self._read_facts(line)
        if matched or others or end:
            if form and form.kind == "timers" and not (matched or end):
                return form
            is_alone = matched or form or known or any(dialect.holds(line) for dialect in self._fallbacks)
            return Form("alone" if is_alone else "facts")
        if not form and (is_argument or (b"  " in line and arguments.UNDOTTED.match(line))):
            return Form("argument")
        return form

    def _read_facts(self, line: bytes) -> tuple[bool, bool, bool]:
        """Read what a line holds besides numbers of iterations; whether it has arguments, other facts, and an end."""
        facts = self._facts
        if is_launch := facts.is_launch(line):
            self._launch(line)
        run = self.run
        found = facts.arguments(line, run), facts.numbers(line, run) or is_launch, facts.end(line, run)
        self._waits = bool(self._open or self._dicts.pending or facts.traceback)
        return found

    def _iterations(self, known: Sequence[Dialect], line: bytes, whole: bool) -> Form | None:
        """Read a line by the dialect that finds most in it: an iteration, or what is printed around iterations."""
        best = _best(known, line)
        if not best:
            found = [self._around(line, dialect, whole) for dialect in known]
            return next(filter(None, found), None)
        spans, dialect = best
        if (parts := dialect.parts(line)) != [line]:
            for part in parts:  # a stamp behind the first iteration is that of a later one
                text = part if part is parts[0] else STAMP.sub(b"", part)
                self._iterations(known, text, whole or part is not parts[-1])
            return Form("alone")
        self._finish()
        if not whole:
            spans = [span for span in spans if span.stop < len(line)]
        row, form = row_of(spans, line), Form("iteration", dialect, line, spans)
        if "iteration" not in row or (not whole and dialect.lines == "wrapped" and "sec_per_it" not in row):
            return form
        form.name = dialect.variant(line) or dialect.name * (not dialect.variants)
        self._open = Open(dialect, row, line, self.number)
        may_continue = dialect.lines == "block" or (
            dialect.lines == "wrapped" and not re.search(dialect.complete.encode(), line)
        )
        if not may_continue or not whole:
            self._end()
        if (
            may_continue
            or dialect.lines == "bar"
            or not dialect.is_blind
            or "iterations_per_second" in (s.column for s in spans)
        ):
            return Form("alone")
        return form

    def _around(self, line: bytes, dialect: Dialect, whole: bool) -> Form | None:
        """Read a line of that dialect that is no iteration."""
        if dialect.is_launch(line):
            self._finish()
            self._launch(line)
        elif dialect.is_end(line):
            self._finish()
            self.run.add_ending(endings.planned_end(line, self.run.rows))
        elif spans := dialect.evaluation(line):
            self._finish()
            self.run.add_validation({"iteration": self.run.iteration} | row_of(spans, line))
            if not self._guess(line, whole):  # of a trainer that prints nothing else
                return Form("evaluation", dialect, line, spans) if dialect.is_blind else Form("alone")
        elif reports := dialect.memories(line):
            for report in reports:
                self.run.add_memory(report, rank(line))
        else:
            return None
        return Form("alone")

    def _guess(self, line: bytes, whole: bool) -> Form | None:
        """Read a line that nothing else reads, in a run that nothing else has read."""
        read = set(self.run.dialects)
        known = [d for d in self._fallbacks if d.holds(line)]
        if not known or not (best := _best(known, line)):
            return None
        if not read <= {best[1].name}:
            return Form("alone")  # in another run it may be an iteration
        return self._iterations([best[1]], line, whole)

    def _steps(self, dialect: Dialect, line: bytes) -> Form | None:
        """Read a companion's steps, which count where nothing else numbers the iterations, and its memory."""
        for report in dialect.memories(line):
            self.run.add_memory(report, rank(line))
        every = dialect.steps(line)
        for spans in every:
            self._companion(row_of(spans, line), Form("step", dialect, line, spans), line)
        if len(every) == 1:
            return Form("step", dialect, line, every[0])
        return Form("alone") if every or dialect.memories(line) else None

    def _companion(self, row: dict[str, float], form: Form, line: bytes) -> None:
        run = self._all[-1]
        if form.memory:
            run.add_memory({column: row.pop(column) for column in form.memory}, form.rank(line))
        if row.get("iteration") == 0:  # step 0 is printed at start-up
            return
        self._settle("deepspeed")
        if run.restarts(row):
            self._begin()
        self.run.dialects["deepspeed"] += 0
        run = self.run
        run.add_companion(row, NAN if run.iterations.rows else form.time(line), line, self.number)

    def _continues(self, line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        opened = self._open
        assert opened
        dialect, opened.lines = opened.dialect, opened.lines + 1
        if dialect.lines == "wrapped":
            return self._completes(opened, line)
        if dialect.begins(line):
            return False
        if spans := dialect.rest(line, set(opened.row)):
            opened.row |= row_of(spans, line)
        elif opened.lines > 200 or not (dialect.continues(line, opened.line) or not line.strip()):
            self._end()
        return bool(spans)

    def _completes(self, opened: Open, line: bytes) -> bool:
        """Whether the line continues an iteration line that a terminal wrapped, which may have removed a blank."""
        dialect, begun = opened.dialect, opened.line
        if opened.lines < 12 and not dialect.begins(line) and not OTHER.match(line):
            joined = max(
                (begun + line, begun.rstrip() + b" " + line.strip()), key=lambda text: _complete(dialect, text)
            )
            if _complete(dialect, joined) > _complete(dialect, begun):
                opened.line, opened.row = joined, row_of(dialect.iterations(joined), joined)
                return True
        self._end()
        return False

    def _finish(self) -> None:
        """Read the pending dict of the Trainer, and the iteration that is open, as far as they go."""
        self._dicts.release()
        self._end()

    def _end(self) -> None:
        if opened := self._open:
            self._open, line = None, opened.line
            time_s = opened.row.get("time_s", timestamp(line))
            name = opened.dialect.variant(line)
            self._take(opened.row, opened.dialect, name, time_s, source(line), line, opened.number)

    def _take(
        self,
        row: dict[str, float],
        dialect: Dialect,
        name: str,
        time_s: float,
        printed: float,
        line: bytes,
        number: int,
        is_plain: bool = False,
    ) -> None:
        """Give an iteration of a dialect, all of whose lines were read, to its run."""
        run = self.run
        if "epochs_done" in row or "nth_epoch" in row:
            run.in_epochs, row = True, _in_run(row)
        if (rate := row.pop("iterations_per_second", 0.0)) > 0:
            row.setdefault("sec_per_it", 1 / rate)
        time_s = row.get("time_s", time_s)
        for column, text in dialect.absent.items():
            if row.get(column) == float(text):
                del row[column]
        if (
            dialect.lines in ("bar", "block")
            and run.dialects.keys() == {dialect.name}
            and run.iteration == row["iteration"]
        ):
            return self._draw_again(run.timed(row, time_s, dialect.name), printed)
        if dialect.fallback:
            if not run.dialects.keys() <= {dialect.name}:
                return None
            row = self._counted_on(row)
            if self._evaluates(row):
                return None
            if _is_late(row, run):
                return run.copies.compare(row, run.iterations)
        name = name or next(iter(run.dialects.keys() & dialect.family), dialect.name)
        self.step(run.timed(row, time_s, name), name, printed, line, number)
        run = self.run
        run.first_iteration = dialect.first_iteration
        alone = run.dialects.keys() <= {name, "deepspeed"} and not run.endings
        counted = dialect.lines in ("bar", "block") or dialect.fallback or run.in_epochs
        run.steady = name if is_plain and alone and not counted else ""
        if held := [column for column in MEMORY if column in row]:
            self.run.add_memory({column: row[column] for column in held}, rank(line))
        return None

    def step(self, row: dict[str, float], dialect: str, printed: float, line: bytes, number: int) -> None:
        """Add an iteration: the next of the run, another rank's copy, or the first of another run."""
        self._settle(dialect)
        run = self.run
        others = run.dialects.keys() - {"deepspeed"}
        takes = run.copies.accepts(row, printed, run)
        counts = {name for name in others if run.dialects[name]}
        family = self._families.get(dialect, frozenset())
        if counts and dialect not in counts and not others <= family:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            takes = None if run.iteration == row["iteration"] else False
        if takes is False:
            self._begin()
            takes = True
        if takes:
            if self.run.iterations.rows and any(e.level == endings.SCHEDULER for e in self.run.endings):
                self._return_delayed()
                before = self.run  # until it is clear whether these lines are its delayed output
                self._all.append(PartialRun(follows=True))
                self.run.previous = before
            return self.run.add(row, dialect, printed, line, number)
        run.copies.compare(row, run.iterations, 1e-6 if dialect in counts else REPORTERS)
        if len(family) == 1:
            run.dialects[dialect] += 0
            run.complete(row)
        return None

    def _settle(self, dialect: str) -> None:
        """Drop what fallbacks have read of the run, where a line of another dialect shows whose it is."""
        if dialect not in self._guesses and not self._guesses.isdisjoint(self.run.dialects):
            self.run.forget()

    def _launch(self, line: bytes) -> None:
        """Read a line of a launch: of another run where the current one has begun, or has failed and repeats it."""
        form = line.translate(DIGITS)
        self._begin(again=bool(self.run.endings) and form in self._launches)
        self._launches.add(form)
        self.run.launched = True

    def _begin(self, again: bool = False) -> None:
        """Begin another run, unless the current one has nothing yet; `again`: its launch failed."""
        if again or self.run.ends_at_launch:
            require(len(self._all) < MAX_RUNS, "log", f"{len(self._all)} runs", "its iterations do not rise")
            self._return_delayed()
            self._all.append(PartialRun(follows=True))
            self._launches.clear()

    def _return_delayed(self) -> None:
        """Return the lines of the last run to the one before it, if they may be its delayed output."""
        if (before := self.run.previous) and self.run.may_be_delayed:
            before.absorb(self._all.pop())

    def _draw_again(self, row: dict[str, float], printed: float) -> None:
        """Read a bar that is drawn again at the same iteration: with its loss after the loss of the one before, which
        counts; or, where it had its loss, for a part of the batch or by another rank, which is noted."""
        run, table = self.run, self.run.iterations
        if table.rows > 1 and "lm_loss" in table and table.last("lm_loss") != table.at("lm_loss", table.rows - 2):
            run.copies.compare(row, table)
        if printed == run.rank or printed != printed:
            table.change_last(row)

    def _counted_on(self, row: dict[str, float]) -> dict[str, float]:
        """The row of a fallback with the number in the run, where numbers have begun anew with an epoch."""
        run = self.run
        before = self._epochs[1] if self._epochs and self._epochs[0] is run else 0.0
        last, epoch, total = run.iteration, run.iterations.last("epoch"), row.get("train_iters", 0.0)
        if total > 0 and row.get("epoch", 0.0) > epoch and row["iteration"] + before <= last:
            before = math.ceil(last / total) * total
            self._epochs, run.in_epochs = (run, before), True
        if before and row.get("epoch", 0.0) >= epoch:
            row["iteration"] += before
            row["train_iters"] = before + total
        return row

    def _evaluates(self, row: dict[str, float]) -> bool:
        """Whether the row of a fallback is an evaluation, which is added: it has a loss of held-out text, and other
        rows have none."""
        run, table = self.run, self.run.iterations
        if not table.rows or ("val_loss" in row) == ("val_loss" in table):
            return False
        held_out = [(row["iteration"], row["val_loss"])] if "val_loss" in row else []
        if not held_out:  # all that was read so far were evaluations
            held_out = list(zip(table.column("iteration").tolist(), table.column("val_loss").tolist(), strict=True))
            run.forget()
        for iteration, loss in held_out:
            run.add_validation({"iteration": iteration, "lm_loss": loss})
        return "val_loss" in row


def _parts(line: bytes) -> list[bytes]:
    """The parts of a line that a progress bar overwrote, or of dicts on one line; a dict is joined with the bar before
    it."""
    bars = b"\r" in line or b"^M" in line or (line.count(b"%|") > 1 and REDRAWN.search(line))
    if not bars and not (line.count(b"loss") > 1 and line.count(b"{") > 1):
        return [line]
    parts, bar = list[bytes](), b""
    for part in REDRAWN.split(line):
        if b"{'" in part and bar and not trainer_dicts.BAR.search(part):
            part = bar + part
        elif trainer_dicts.BAR.search(part):
            bar = part[-1000:]
        parts.append(part)
    return [dict_ for part in parts for dict_ in JOINED.split(part)]


def _in_run(row: dict[str, float]) -> dict[str, float]:
    """The row with the iteration's number in the run, where it has that in its epoch."""
    for column in EPOCHS.keys() & row:
        done = row["epoch"] = row.pop(column) - EPOCHS[column]
        if "train_iters" in row:
            row["iteration"] += done * row["train_iters"]
            row["train_iters"] *= done + 1  # as far as is known: the number of epochs is not
    return row


def _is_late(row: dict[str, float], run: PartialRun) -> bool:
    """Whether the row is a copy of one of the last iterations: unnamed ranks may all print a loss. A number further
    back is a restart's, or another program's."""
    of_epoch = not row.get("epoch", NAN) > run.iterations.last("epoch")
    return of_epoch and run.iterations.find("iteration", row["iteration"], back=4) is not None


def _complete(dialect: Dialect, line: bytes) -> int:
    """How many numbers of an iteration line are complete: a number at the end of the line may go on."""
    return sum(span.stop < len(line) for span in dialect.iterations(line))


def _best(known: Sequence[Dialect], line: bytes) -> tuple[list[Span], Dialect] | None:
    """The numbers of an iteration, and of several dialects that know the line the one that finds most."""
    found = [(spans, dialect) for dialect in known if (spans := dialect.iterations(line))]
    return max(found, key=lambda pair: len(pair[0])) if found else None


def find_lines(path: Path, numbers: Collection[int], first: int = 1, last: int = 0) -> dict[int, tuple[int, str]]:
    """Number and text of the line of each of these iterations, where one line alone shows it, from the line `first` to
    `last` (counted from 1; 0: to the end).
    """
    written = b"|".join(b"%d|%s" % (n, f"{n:,}".encode()) for n in sorted(numbers))
    word = re.compile(rb"(?<![\d.,])(?:" + written + rb")(?![\d.])")
    found, number, left = dict[int, tuple[int, str]](), 1, 1000  # lines that hold such a number and are read
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
