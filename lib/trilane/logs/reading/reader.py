"""Reader: blocks of a log in, runs out.

Programs pad or round their numbers, so a log has few *forms*, which are lines with every digit as
0. The first line of a form is searched by all rules; where it is one iteration, or nothing, the
others of its form are read by the places of its numbers, or passed over.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from trilane.logs import arguments, endings
from trilane.logs.dialects import Dialect, Span, dialects, row_of
from trilane.logs.prefixes import STAMP, body, rank, timestamp
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.facts import Facts, timers
from trilane.logs.reading.runs import DIGITS, MEMORY, PartialRun, Runs
from trilane.workspace.status import Status

LONG = 1 << 16  # bytes: longer lines are searched for iterations only
FORM = 4096  # bytes of the longest line whose form is remembered
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Form:
    """Lines of one form, and the places of their numbers: an iteration of a dialect, or without one
    timers.
    """

    def __init__(self, line: bytes, spans: Sequence[Span], dialect: Dialect | None = None) -> None:
        self.dialect, self.name = dialect, ""
        columns = [span.column for span in spans]
        once = [s for s in spans if columns.count(s.column) == 1]
        commas = {s.column for s in once if b"," in line[s.start : s.stop]}
        plain = [s for s in once if s.column not in commas]
        # itemgetter and map take all numbers of a line in a third of the time of a loop; it needs
        # two places at least
        self._names = [s.column for s in plain]
        self._texts = itemgetter(*(slice(s.start, s.stop) for s in plain), slice(0), slice(0))
        self._scaled = [(s.column, s.multiplier, s.divisor) for s in plain if s[3:] != (1.0, 1.0)]
        self._others = [s for s in spans if s not in plain]

    def row(self, line: bytes) -> dict[str, float]:
        """The numbers of a line of this form."""
        row = dict(zip(self._names, map(float, self._texts(line)), strict=False))
        for column, multiplier, divisor in self._scaled:
            row[column] = row[column] * multiplier / divisor
        return row | row_of(self._others, line) if self._others else row


@dataclass
class Open:
    """An iteration whose other numbers stand on the next lines: its row so far, its first line, and
    how many lines it has.
    """

    dialect: Dialect
    row: dict[str, float]
    line: bytes
    lines: int = 0


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run."""

    def __init__(self) -> None:
        every = dialects()
        self._tables, self._companions = (
            [d for d in every if d.companion is kind] for kind in (False, True)
        )
        self._words = [
            (word.encode(), dialect.name) for dialect in self._tables for word in dialect.words
        ]
        self._runs = Runs(every)
        self._forms = dict[bytes, Form | None]()  # None: of lines that hold nothing
        self._alone = Form(
            b"", ()
        )  # where other digits may make it another line, or it is of several parts
        self._open: Open | None = None
        self._facts, self._dicts = Facts(), trainer_dicts.TrainerDicts(self._runs)
        self._waits = False  # whether the next line matters whatever it holds

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self._runs.all[-1]

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        self._finish()
        self._facts.close(self.run)
        return [run for run in self._runs.all if run.has_content]

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        *lines, rest = block.split(b"\n")
        unknown, known = self._alone, self._forms.get
        for line in lines:
            if self._waits:
                self._line(line)
                continue
            form = known(line.translate(DIGITS), unknown)
            if form is unknown:
                self._learn(line)
            elif form is not None:
                self._apply(form, line)
        if rest:  # may be cut
            self._line(rest, whole=False)

    def _learn(self, line: bytes) -> None:
        form = self._line(line)
        if len(line) <= FORM and form is not self._alone:
            if len(self._forms) > 50_000:  # the wording of a log changes
                self._forms.clear()
            self._forms[line.translate(DIGITS)] = form

    def _apply(self, form: Form, line: bytes) -> None:
        """Read a line of a known form."""
        row = form.row(line)
        if form.dialect:
            self._runs.take(row, form.dialect, form.name, line)
        else:
            self.run.add_timers(row)

    def _line(self, line: bytes, whole: bool = True) -> Form | None:
        """Read one line by all rules, not `whole` if the file ends inside it. Returns its form,
        None where it holds nothing.
        """
        text = line
        if b"\x1b" in line or b"\0" in line:
            text = ESCAPE.sub(b"", line).replace(b"\0", b"")
        text = text.rstrip(b"\r\n")
        parts = _parts(text)
        *forms, form = [self._part(part, whole or part is not parts[-1]) for part in parts]
        self._waits = bool(self._open or self._dicts.pending or self._facts.traceback)
        return self._alone if any(forms) or (form and (forms or text != line)) else form

    def _part(self, line: bytes, whole: bool) -> Form | None:
        """Read a line, or a part of one that a bar overwrote."""
        if self._dicts.pending and b"{'" not in line and body(line).strip():
            self._dicts.release(line)
        if self._open and self._continues(line):
            return self._alone
        held = {name for word, name in self._words if word in line}
        known = [dialect for dialect in self._tables if dialect.name in held or not dialect.words]
        form = self._iterations(known, line, whole) if known else None
        matched = any(
            [self._steps(dialect, line) for dialect in self._companions if dialect.holds(line)]
        )
        if form and b'"timers": {' in line:  # a line of steps.jsonl has both
            self.run.add_timers(row_of(timers(line), line))
            return self._alone
        if form or len(line) >= LONG:
            return self._alone if matched else form
        matched |= not all(dialect.is_blind for dialect in known)
        if b"{'" in line:
            matched = True
            self._dicts.read(line)
        elif (b"it/s" in line or b"s/it" in line) and (bar := trainer_dicts.bar(line)):
            matched, self._dicts.bar = True, bar
        facts = self._facts
        if is_launch := facts.is_launch(line):
            self._runs.launch(line)
        run, spans = self.run, [] if matched else timers(line)
        found = facts.arguments(line, run), facts.numbers(line, run), facts.end(line, run)
        if spans and not (is_launch or found[0] or found[2]):
            return Form(line, spans)
        may_be_argument = b"  " in line and arguments.UNDOTTED.match(line)
        return self._alone if matched or is_launch or any(found) or may_be_argument else None

    def _iterations(self, known: Sequence[Dialect], line: bytes, whole: bool) -> Form | None:
        """Read a line by the dialect that finds most in it: an iteration, or what is printed around
        iterations.
        """
        read = [(spans, dialect) for dialect in known if (spans := dialect.iterations(line))]
        if not read:
            found = [self._around(line, dialect) for dialect in known]
            return next(filter(None, found), None)
        spans, dialect = max(read, key=lambda pair: len(pair[0]))
        if (parts := dialect.parts(line)) != [line]:
            for part in parts:  # a stamp behind the first iteration is that of a later one
                text = part if part is parts[0] else STAMP.sub(b"", part)
                self._iterations(known, text, whole or part is not parts[-1])
            return self._alone
        self._finish()
        if not whole:
            spans = [span for span in spans if span.stop < len(line)]
        row, form = row_of(spans, line), Form(line, spans, dialect)
        if "iteration" not in row or (
            not whole and dialect.lines == "closed" and "sec_per_it" not in row
        ):
            return form
        form.name = dialect.variant(line) or dialect.name * (not dialect.variants)
        self._open = Open(dialect, row, line)
        may_continue = dialect.lines == "block"
        if not may_continue or not whole:
            self._end()
        if (
            may_continue
            or dialect.lines == "bar"
            or not dialect.is_blind
            or "iterations_per_second" in (s.column for s in spans)
        ):
            return self._alone
        return form

    def _around(self, line: bytes, dialect: Dialect) -> Form | None:
        """Read a line of that dialect that is no iteration."""
        if dialect.matches("launch", line):
            self._finish()
            self._runs.launch(line)
        elif dialect.matches("end", line):
            self._finish()
            self.run.add_ending(
                endings.reported(endings.Level.PLANNED, Status.COMPLETED, line, self.run.rows)
            )
        elif spans := dialect.evaluation(line):
            self._finish()
            self.run.add_validation(row_of(spans, line))
        elif not self._memory(dialect, line):
            return None
        return self._alone

    def _memory(self, dialect: Dialect, line: bytes) -> bool:
        """Read the reports of memory in a line; whether it has any."""
        reports = dialect.every("memory", line)
        for spans in reports:
            self.run.add_memory(row_of(spans, line), rank(line))
        return bool(reports)

    def _steps(self, dialect: Dialect, line: bytes) -> bool:
        """Read a companion's steps, which count where nothing else numbers the iterations, and its
        memory; whether the line has any.
        """
        has_memory, every = self._memory(dialect, line), dialect.every("iteration", line)
        for row in (row_of(spans, line) for spans in every):
            if held := {column: row.pop(column) for column in MEMORY if column in row}:
                self.run.add_memory(held, rank(line))
            if row.get("iteration") == 0:  # step 0 is printed at start-up
                continue
            if self.run.restarts(row):
                self._runs.begin()
            self.run.dialects["deepspeed"] += 0
            self.run.add_companion(row, timestamp(line), line)
        return bool(every) or has_memory

    def _continues(self, line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        opened = self._open
        assert opened
        dialect, opened.lines = opened.dialect, opened.lines + 1
        if dialect.matches("iteration", line):
            return False
        if spans := dialect.rest(line, set(opened.row)):
            opened.row |= row_of(spans, line)
        elif opened.lines > 200 or not (
            line[:1].isspace() or body(line)[:1].isspace() or not line.strip()
        ):
            self._end()
        return bool(spans)

    def _finish(self) -> None:
        """Read the pending dict of the Trainer, and the iteration that is open, as far as they go."""
        self._dicts.release()
        self._end()

    def _end(self) -> None:
        if opened := self._open:
            self._open = None
            self._runs.take(
                opened.row, opened.dialect, opened.dialect.variant(opened.line), opened.line
            )


def _parts(line: bytes) -> list[bytes]:
    """The parts of a line that a progress bar overwrote; a dict is joined with the bar before it."""
    if b"\r" not in line:
        return [line]
    parts, bar = list[bytes](), b""
    for part in line.split(b"\r"):
        if b"{'" in part and bar and not trainer_dicts.BAR.search(part):
            part = bar + part
        elif trainer_dicts.BAR.search(part):
            bar = part[-1000:]
        parts.append(part)
    return parts
