"""Reader: lines of a log in, runs out.

Most lines hold nothing. Such a line is searched by all rules once; others that differ from it in
digits only are passed over.
"""

import re
from collections.abc import Sequence

from trilane.logs import endings
from trilane.logs.dialects import Dialect, dialects
from trilane.logs.prefixes import source
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.facts import LAUNCH, Facts
from trilane.logs.reading.runs import PartialRun, Runs
from trilane.logs.table import Row
from trilane.workspace.status import Status

LONG = 1 << 16  # bytes: longer lines are searched for iterations only
MAX_FORM = 4096  # bytes of the longest line that is remembered to hold nothing
MAX_FORMS = 50_000  # of these
DIGITS = bytes.maketrans(b"123456789", b"000000000")
CUT = re.compile(rb"[-+.,\deE]+$")  # a number at the end of a file, which may go on
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\0")


class Reader:
    """Reads lines in order; `close` returns a PartialRun for each run."""

    def __init__(self) -> None:
        self._runs = Runs()
        self._empty: set[bytes] = set()  # lines that hold nothing, whatever their digits
        # an iteration whose other numbers stand on the next lines: its row so far, its first line
        self._open: tuple[Dialect, Row, bytes] | None = None
        self._facts = Facts()
        self._dicts = trainer_dicts.TrainerDicts(self._runs)

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        self._end()
        return [run for run in self._runs.all if run.has_content]

    def read(self, line: bytes) -> None:
        """Read a line with its end, which only the last one of a file may lack."""
        form = line.translate(DIGITS)
        is_inside = self._open or self._facts.traceback or self._facts.inside
        if form in self._empty and not is_inside:
            return
        is_whole = line.endswith(b"\n")
        if b"\x1b" in line or b"\0" in line:
            line = ESCAPE.sub(b"", line)
        # a progress bar overwrites what is before it
        *parts, last = line.rstrip(b"\r\n").split(b"\r")
        for part in parts:
            self._part(part, True)
        has_content = self._part(last, is_whole)
        if len(form) <= MAX_FORM and len(self._empty) < MAX_FORMS and not (has_content or parts):
            self._empty.add(form)

    def _part(self, line: bytes, is_whole: bool) -> bool:
        """Read a line, or a part of one that a bar overwrote; whether it, or one with other digits,
        may hold anything.
        """
        if self._open and self._continues(*self._open[:2], line):
            return True
        tables = [table for table in dialects() if table.holds(line)]
        if self._iteration(tables, line, is_whole) or len(line) >= LONG:
            return True
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
        has_arguments = self._facts.arguments(line, self._runs.run)
        has_numbers = self._facts.numbers(line, self._runs.run)
        has_end = self._facts.end(line, self._runs.run)
        is_other = is_launch or has_arguments or has_numbers or has_end
        return is_other or is_dict or is_bar or bool(tables)

    def _iteration(self, tables: Sequence[Dialect], line: bytes, is_whole: bool) -> bool:
        """Read a line by the dialect that finds most in it: an iteration, or what is printed around
        iterations. Whether it is one.
        """
        row: Row = {}
        text = line if is_whole else CUT.sub(b"", line)
        for table in tables:
            of_table = table.iteration_row(text)
            if len(of_table) > len(row):
                row = of_table
                dialect = table
        if not row:
            return any([self._around(line, table) for table in tables])
        self._end()
        if "iteration" in row:
            self._open = dialect, row, line
        if dialect.lines != "block" or not is_whole:
            self._end()
        return True

    def _around(self, line: bytes, dialect: Dialect) -> bool:
        """Read a line of that dialect that is no iteration; whether it is one."""
        if dialect.rows("end", line):
            self._end()
            level = endings.Level.PLANNED
            self._runs.run.add_ending(
                endings.reported(level, Status.COMPLETED, line, self._runs.run.rows)
            )
        elif evaluations := dialect.rows("validation", line):
            self._end()
            self._runs.run.add_validation(evaluations[0])
        else:
            reports = dialect.rows("memory", line)
            for report in reports:
                self._runs.run.add_memory(report, source(line))
            return bool(reports)
        return True

    def _continues(self, dialect: Dialect, row: Row, line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        if dialect.rows("iteration", line):
            return False
        if more := dialect.rest(line, row):
            row |= more
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
