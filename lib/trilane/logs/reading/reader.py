"""Reader: lines of a log in, runs out.

Programs pad or round their numbers, so a log has few *forms*, which are lines with every digit as
0. The first line of a form is searched by all rules; where it is one iteration, timers, or nothing,
the others of its form are read by the places of their numbers, or passed over.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trilane.logs import endings
from trilane.logs.dialects import Dialect, Span, dialects, row_of
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.facts import LAUNCH, Facts, timers
from trilane.logs.reading.runs import PartialRun, Runs
from trilane.logs.table import Row
from trilane.workspace.status import Status

LONG = 1 << 16  # bytes: longer lines are searched for iterations only
MAX_FORM = 4096  # bytes of the longest line whose form is remembered
MAX_FORMS = 50_000  # more are forgotten: the wording of a log changes
DIGITS = bytes.maketrans(b"123456789", b"000000000")
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\0")


class Form(NamedTuple):
    """Where the numbers of lines of one form stand: of an iteration of a dialect, or without one of
    timers; without any the lines hold nothing.
    """

    dialect: Dialect | None = None
    spans: Sequence[Span] = ()


class Reader:
    """Reads the lines of a file."""

    def __init__(self) -> None:
        self._runs = Runs()
        self._forms: dict[bytes, Form] = {}
        # an iteration whose other numbers stand on the next lines: its row so far, its first line
        self._open: tuple[Dialect, Row, bytes] | None = None
        self._facts = Facts()
        self._dicts = trainer_dicts.TrainerDicts(self._runs)

    def read(self, lines: Iterable[bytes]) -> list[PartialRun]:
        """The runs that have any content; of the lines, with their ends, only the last may lack
        one.
        """
        for line in lines:
            key = line.translate(DIGITS)
            form = self._forms.get(key)
            if form is None or self._open or self._facts.traceback:
                form = self._line(line)
                if form and len(line) <= MAX_FORM:
                    if len(self._forms) > MAX_FORMS:
                        self._forms.clear()
                    self._forms[key] = form
            elif form.dialect:
                self._runs.take(row_of(form.spans, line), form.dialect, line)
            elif form.spans:
                self._runs.run.add_timers(row_of(form.spans, line))
        self._end()
        return [run for run in self._runs.all if run.has_content]

    def _line(self, line: bytes) -> Form | None:
        """Read a line by all rules; its form, None where other digits may make it another line, or
        it is of several parts.
        """
        text = ESCAPE.sub(b"", line)
        # a progress bar overwrites what is before it
        *parts, last = text.rstrip(b"\r\n").split(b"\r")
        for part in parts:
            self._part(part, True)
        form = self._part(last, line.endswith(b"\n"))
        if parts or (form and form.spans and text != line):
            return None
        return form

    def _part(self, line: bytes, is_whole: bool) -> Form | None:
        """Read a line, or a part of one that a bar overwrote."""
        if self._open and self._continues(*self._open[:2], line):
            return None
        tables = [table for table in dialects() if table.holds(line)]
        form = self._iteration(tables, line, is_whole)
        if form != Form() or len(line) >= LONG:
            return form
        is_dict = b"{'" in line
        is_bar = b"it/s" in line or b"s/it" in line
        if is_dict:
            self._dicts.read(line)
        elif is_bar and (bar := trainer_dicts.bar(line)):
            self._dicts.bar = bar
        is_launch = bool(LAUNCH.search(line))
        if is_launch:  # of another run where the current one has begun or ended
            self._runs.begin()
            self._runs.run.launched = True
        run = self._runs.run
        spans = timers(line)
        if spans:
            run.add_timers(row_of(spans, line))
        has_arguments = self._facts.arguments(line, run)
        has_numbers = self._facts.numbers(line, run)
        has_end = self._facts.end(line, run)
        is_other = is_dict or is_bar or is_launch or has_arguments or has_numbers or has_end
        if is_other or not all(table.is_blind for table in tables):
            return None
        return Form(None, spans)

    def _iteration(self, tables: Sequence[Dialect], line: bytes, is_whole: bool) -> Form | None:
        """Read a line by the dialect that finds most in it: an iteration, or what is printed around
        iterations.
        """
        spans: list[Span] = []
        for table in tables:
            of_table = table.iterations(line)
            if len(of_table) > len(spans):
                spans = of_table
                dialect = table
        if not spans:
            around = [self._around(line, table) for table in tables]
            return None if any(around) else Form()
        self._end()
        if not is_whole:  # the last number may be cut
            spans = [span for span in spans if span.stop < len(line)]
        row = row_of(spans, line)
        if "iteration" in row:
            self._open = dialect, row, line
        if dialect.lines != "block" or not is_whole:
            self._end()
        return Form(dialect, spans) if dialect.is_blind else None

    def _around(self, line: bytes, dialect: Dialect) -> bool:
        """Read a line of that dialect that is no iteration; whether it is one."""
        if dialect.every("end", line):
            self._end()
            level = endings.Level.PLANNED
            self._runs.run.add_ending(
                endings.reported(level, Status.COMPLETED, line, self._runs.run.rows)
            )
        elif evaluations := dialect.every("validation", line):
            self._end()
            self._runs.run.add_validation(row_of(evaluations[0], line))
        else:
            reports = dialect.every("memory", line)
            for spans in reports:
                self._runs.run.add_memory(row_of(spans, line))
            return bool(reports)
        return True

    def _continues(self, dialect: Dialect, row: Row, line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        if dialect.every("iteration", line):
            return False
        if spans := dialect.rest(line, row):
            row |= row_of(spans, line)
            return True
        if line.strip() and not line[:1].isspace():
            self._end()
        return False

    def _end(self) -> None:
        """Read the iteration that is open, as far as it goes."""
        if opened := self._open:
            self._open = None
            dialect, row, line = opened
            self._runs.take(row, dialect, line)
