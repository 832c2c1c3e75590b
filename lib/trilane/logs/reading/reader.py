"""Reader: blocks of a log in, runs out.

Programs pad or round their numbers, so a log has few *forms*, which are lines with every digit as
0. The first line of a form is searched by all rules; where it is one iteration, or nothing, the
others of its form are read by the places of their numbers, or passed over.
"""

import re
from collections.abc import Sequence
from operator import itemgetter

from trilane.logs import endings
from trilane.logs.dialects import Dialect, Span, dialects, row_of
from trilane.logs.prefixes import rank
from trilane.logs.reading import trainer_dicts
from trilane.logs.reading.facts import LAUNCH, Facts, timers
from trilane.logs.reading.runs import DIGITS, PartialRun, Runs
from trilane.workspace.status import Status

LONG = 1 << 16  # bytes: longer lines are searched for iterations only
MAX_FORM = 4096  # bytes of the longest line whose form is remembered
MAX_FORMS = 50_000  # more are forgotten: the wording of a log changes
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\0")


class Form:
    """Lines of one form, and the places of their numbers: an iteration of a dialect, or without one
    timers.
    """

    def __init__(self, line: bytes, spans: Sequence[Span], dialect: Dialect | None = None) -> None:
        self.dialect = dialect
        columns = [span.column for span in spans]
        self._others: list[Span] = []
        plain: list[Span] = []
        for span in spans:
            has_comma = b"," in line[span.start : span.stop]
            if has_comma or columns.count(span.column) > 1:
                self._others.append(span)
            else:
                plain.append(span)
        # itemgetter and map take all numbers of a line in a third of the time of a loop; it needs
        # two places at least
        places = [slice(span.start, span.stop) for span in plain]
        self._names = [span.column for span in plain]
        self._texts = itemgetter(*places, slice(0), slice(0))
        self._scaled = [(s.column, s.multiplier, s.divisor) for s in plain if s[3:] != (1.0, 1.0)]

    def row(self, line: bytes) -> dict[str, float]:
        """The numbers of a line of this form."""
        row = dict(zip(self._names, map(float, self._texts(line)), strict=False))
        for column, multiplier, divisor in self._scaled:
            row[column] = row[column] * multiplier / divisor
        if self._others:
            row |= row_of(self._others, line)
        return row


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run."""

    def __init__(self) -> None:
        self._runs = Runs()
        self._forms: dict[bytes, Form | None] = {}  # None: of lines that hold nothing
        # where other digits may make it another line, or it is of several parts
        self._alone = Form(b"", ())
        # an iteration whose other numbers stand on the next lines: its row so far, its first line
        self._open: tuple[Dialect, dict[str, float], bytes] | None = None
        self._facts = Facts()
        self._dicts = trainer_dicts.TrainerDicts(self._runs)
        self._waits = False  # whether the next line matters whatever it holds

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self._runs.all[-1]

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        self._end()
        return [run for run in self._runs.all if run.has_content]

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        *lines, rest = block.split(b"\n")
        unknown = self._alone
        for line in lines:
            if self._waits:
                self._line(line)
                continue
            key = line.translate(DIGITS)
            form = self._forms.get(key, unknown)
            if form is unknown:
                form = self._line(line)
                if len(line) <= MAX_FORM and form is not unknown:
                    if len(self._forms) > MAX_FORMS:
                        self._forms.clear()
                    self._forms[key] = form
            elif form is not None and form.dialect:
                self._runs.take(form.row(line), form.dialect, line)
            elif form is not None:
                self.run.add_timers(form.row(line))
        if rest:  # may be cut
            self._line(rest, is_whole=False)

    def _line(self, line: bytes, is_whole: bool = True) -> Form | None:
        """Read one line by all rules, not `is_whole` if the file ends inside it. Returns its form,
        None where it holds nothing.
        """
        text = line
        if b"\x1b" in line or b"\0" in line:
            text = ESCAPE.sub(b"", line)
        # a progress bar overwrites what is before it
        *parts, last = text.rstrip(b"\r").split(b"\r")
        for part in parts:
            self._part(part, True)
        form = self._part(last, is_whole)
        if parts or (form and text != line):
            form = self._alone
        self._waits = bool(self._open or self._facts.traceback or self._facts.inside)
        return form

    def _part(self, line: bytes, is_whole: bool) -> Form | None:
        """Read a line, or a part of one that a bar overwrote."""
        if self._open and self._continues(*self._open[:2], line):
            return self._alone
        tables = [table for table in dialects() if table.holds(line)]
        form = self._iteration(tables, line, is_whole)
        matched = not all(table.is_blind for table in tables)
        if form or len(line) >= LONG:
            return self._alone if matched else form
        if b"{'" in line:
            matched = True
            self._dicts.read(line)
        elif (b"it/s" in line or b"s/it" in line) and (bar := trainer_dicts.bar(line)):
            matched = True
            self._dicts.bar = bar
        return self._other(line, matched)

    def _other(self, line: bytes, matched: bool) -> Form | None:
        """Read what stands on a line without an iteration."""
        spans = [] if matched else timers(line)
        is_launch = bool(LAUNCH.search(line))
        if is_launch:
            self._runs.launch()
        has_arguments = self._facts.arguments(line, self.run)
        has_numbers = self._facts.numbers(line, self.run)
        has_end = self._facts.end(line, self.run)
        if spans and not (is_launch or has_arguments or has_end):
            return Form(line, spans)
        if matched or is_launch or has_arguments or has_numbers or has_end:
            return self._alone
        return None

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
            if any(around):
                return self._alone
            return None
        self._end()
        if not is_whole:  # the last number may be cut
            spans = [span for span in spans if span.stop < len(line)]
        row = row_of(spans, line)
        if "iteration" in row:
            self._open = dialect, row, line
        if dialect.lines != "block" or not is_whole:
            self._end()
        return Form(line, spans, dialect) if dialect.is_blind else self._alone

    def _around(self, line: bytes, dialect: Dialect) -> bool:
        """Read a line of that dialect that is no iteration; whether it is one."""
        if dialect.matches("end", line):
            self._end()
            level = endings.Level.PLANNED
            self.run.add_ending(endings.reported(level, Status.COMPLETED, line, self.run.rows))
        elif evaluations := dialect.every("validation", line):
            self._end()
            self.run.add_validation(row_of(evaluations[0], line))
        else:
            reports = dialect.every("memory", line)
            for spans in reports:
                self.run.add_memory(row_of(spans, line), rank(line))
            return bool(reports)
        return True

    def _continues(self, dialect: Dialect, row: dict[str, float], line: bytes) -> bool:
        """Whether the line continues the iteration that is open, which then may end."""
        if dialect.matches("iteration", line):
            return False
        if spans := dialect.rest(line, set(row)):
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
