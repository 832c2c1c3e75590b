"""Reader: lines of a log in, runs out.

Programs pad or round their numbers, so a log has few *forms*, which are lines with every digit as
0. The first line of a form is searched by all rules; where it is one iteration, timers, or nothing,
the others of its form are read by the places of their numbers, or passed over.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trilane.logs import endings
from trilane.logs.dialects import Dialect, Span, holding, row_of
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.facts import LAUNCH, Facts, timers
from trilane.logs.reading.runs import PartialRun, Printed, Runs
from trilane.logs.table import Row
from trilane.workspace.status import Status

LONG = 1 << 16  # bytes: longer lines are searched for iterations only
MAX_FORM = 4096  # bytes of the longest line whose form is remembered
MAX_FORMS = 10_000  # of 3 kB; more are forgotten: the wording of a log changes
DIGITS = bytes.maketrans(b"123456789", b"000000000")
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\0")


class Form(NamedTuple):
    """What lines of one form hold: where the numbers stand of an iteration of a dialect, of timers
    or of reports of memory; and whether they are of a launch, or give arguments.
    """

    dialect: Dialect | None = None
    iteration: Sequence[Span] = ()
    printed: Printed | None = None
    timers: Sequence[Span] = ()
    memory: Sequence[Sequence[Span]] = ()
    is_launch: bool = False
    has_arguments: bool = False


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
            elif form.printed is None or not self._runs.keep(form.printed, line):
                self._again(form, line)
        self._end()
        self._runs.add_texts()
        return [run for run in self._runs.all if run.has_content]

    def _again(self, form: Form, line: bytes) -> None:
        """Read a line of a form that was read before."""
        if form.dialect and not self._runs.ignores(form.dialect):
            self._runs.take(row_of(form.iteration, line), form.dialect, line, form.printed)
        elif form.timers:
            self._runs.current.add_timers(row_of(form.timers, line))
        for spans in form.memory:
            self._runs.current.add_memory(row_of(spans, line))
        if form.is_launch:
            self._runs.launch()
        if form.has_arguments:
            self._facts.arguments(line, self._runs.run)

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
        if parts or (form != Form() and text != line):
            return None
        return form

    def _part(self, line: bytes, is_whole: bool) -> Form | None:
        """Read a line, or a part of one that a bar overwrote."""
        if self._open and self._continues(*self._open[:2], line):
            return None
        tables = holding(line)
        form = self._iteration(tables, line, is_whole)
        if form != Form() or len(line) >= LONG:
            return form
        is_dict = b"{'" in line
        is_bar = b"it/s" in line or b"s/it" in line
        if is_dict:
            self._dicts.read(line)
        elif is_bar:
            self._dicts.see(line)
            line = trainer_dicts.UP_TO_BAR.sub(b"", line)
        is_launch = bool(LAUNCH.search(line))
        if is_launch:
            self._runs.launch()
        run = self._runs.run
        spans = timers(line)
        if spans:
            run.add_timers(row_of(spans, line))
        has_arguments = self._facts.arguments(line, run)
        has_numbers = self._facts.numbers(line, run)
        has_end = self._facts.end(line, run)
        is_other = is_dict or is_bar or has_numbers or has_end
        if is_other or not all(table.is_blind for table in tables):
            return None
        return Form(timers=spans, is_launch=is_launch, has_arguments=has_arguments)

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
            memory = tuple(spans for reports in around if reports for spans in reports)
            if [] in around or (memory and not all(table.is_blind for table in tables)):
                return None
            return Form(memory=memory)
        self._end()
        if not is_whole:  # the last number may be cut
            spans = [span for span in spans if span.stop < len(line)]
        row = row_of(spans, line)
        if "iteration" in row:
            self._open = dialect, row, line
        if dialect.lines != "block" or not is_whole:
            self._end()
        is_glued = is_whole and self._glued(spans, line)
        if is_glued or not dialect.is_blind:
            return None
        return Form(dialect, spans, self._runs.printed(dialect, spans, line))

    def _glued(self, spans: Sequence[Span], line: bytes) -> bool:
        """Read what another rank printed behind the numbers; whether it may be an ending."""
        behind = line[max(span.stop for span in spans) :].lstrip(b" |],")
        is_end = b"Traceback" in behind or bool(endings.any_word().search(behind))
        if is_end:
            self._facts.end(behind, self._runs.run)
        return is_end

    def _around(self, line: bytes, dialect: Dialect) -> list[list[Span]] | None:
        """Read a line of that dialect that is no iteration: its reports of memory; None for a line
        that is not the dialect's.
        """
        if dialect.every("end", line):
            self._end()
            self._runs.run.add_ending(
                endings.reported(endings.Level.PLANNED, Status.COMPLETED, line, self._runs.run.rows)
            )
        elif evaluations := dialect.every("validation", line):
            self._end()
            self._runs.run.add_validation(row_of(evaluations[0], line))
        else:
            reports = dialect.every("memory", line)
            for spans in reports:
                self._runs.current.add_memory(row_of(spans, line))
            return reports or None
        return []

    def _continues(self, dialect: Dialect, row: Row, line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        if dialect.every("iteration", line):
            return False
        if spans := dialect.rest(line, row):
            row |= row_of(spans, line)
            self._glued(spans, line)
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
