"""Form: what lines that are alike but for their digits hold, and at which places."""

from collections.abc import Sequence
from operator import itemgetter

from trilane.logs.dialects import Dialect, Span, row_of
from trilane.logs.prefixes import NAN, PREFIX, STAMP, timestamp

DIGITS = bytes.maketrans(b"123456789", b"000000000")
MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved")
FORM = 4096  # bytes of the longest line whose form is remembered


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
