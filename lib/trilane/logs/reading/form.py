"""Form: what lines that are alike but for their digits hold, and at which places."""

from collections.abc import Sequence
from operator import itemgetter

from trilane.logs.dialects import Dialect, Span, row_of

DIGITS = bytes.maketrans(b"123456789", b"000000000")
FORM = 4096  # bytes of the longest line whose form is remembered


class Form:
    """Lines of one form, and the places of their numbers: an iteration of a dialect, or without one timers."""

    def __init__(self, line: bytes, spans: Sequence[Span], dialect: Dialect | None = None) -> None:
        self.dialect, self.name = dialect, ""
        columns = [span.column for span in spans]
        once = [s for s in spans if columns.count(s.column) == 1]
        commas = {s.column for s in once if b"," in line[s.start : s.stop]}
        plain = [s for s in once if s.column not in commas]
        # itemgetter and map take all numbers of a line in a third of the time of a loop; it needs two places at least
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
