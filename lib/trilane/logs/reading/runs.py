"""The runs of a log while it is read: what was read of each, and whether an iteration is the next
of a run, a copy of another rank's, or the first of another run.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

from trilane.logs.arguments import Value
from trilane.logs.dialects import Dialect, Span
from trilane.logs.endings import ENDS, Ending, Level, joined, superseded
from trilane.logs.places import Places
from trilane.logs.prefixes import source, timestamp
from trilane.logs.table import NAN, NumericTable, Row, Unit
from trilane.logs.watchdog import Watchdogs
from trilane.utils.validation import require

MAX_RUNS = 10_000  # of a file
SHORT_S = 20.0  # which stamps of whole seconds give to 5 %, and their median to 1 %
MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved")
# columns that are more than a number of the table
READ_AT_ONCE = {*MEMORY, "iterations_per_second", "time_s"}
STEPS = "deepspeed"
BARS = "progress bar"
WEAK = (BARS, STEPS)  # which count where nothing later in this list, nor another dialect, does
LAUNCHED = (*ENDS, Level.LAUNCHER)
MAX_TEXTS = 100  # iterations that are kept as text


class Printed(NamedTuple):
    """Iterations of one form that may be kept as text: their dialect, the units of their numbers,
    the first of which is the iteration's, and where these and their source stand.
    """

    dialect: str
    units: tuple[Unit, ...]
    texts: Callable[[bytes], tuple[bytes, ...]]
    source: slice


class PartialRun:
    """What was read of a run so far. Tables grow by 8 bytes a number; everything else is bounded by
    the number of ranks and names.
    """

    def __init__(self, follows: bool = False) -> None:
        self.iterations = NumericTable()
        self.timers = NumericTable()
        self.validation = NumericTable()
        self.memory: Row = {}
        self.arguments: dict[str, Value] = {}
        self.summary: Row = {}
        self.dialects: Counter[str] = Counter()
        self.own: list[str] = []
        self.ahead: Row = {}  # numbers of the next iteration
        self.program = ""  # by a line of its own
        self.follows = follows  # a run before it in the file
        self.launched = False  # whether its launch was read
        self.endings: list[Ending] = []
        self.watchdogs = Watchdogs()
        self.places = Places()
        self.iteration = 0.0  # the number of the last one, 0 before the first
        self.first_iteration = 1  # what the program calls its first iteration
        self.last_line = b""  # of an iteration
        self.is_nan = False  # the last loss
        self._timed = (NAN, NAN)  # an iteration and its time
        self.rank = NAN  # that prints the iterations, if known
        self.printed: dict[float, float] = {}  # the last iteration of each source (NaN: not named)

    @property
    def rows(self) -> int:
        """How many iterations were read."""
        return self.iterations.rows

    @property
    def ends_at_launch(self) -> bool:
        """Whether a launch seen now begins another run."""
        has_ended = any(ending.level in LAUNCHED for ending in self.endings)
        return has_ended or bool(self.rows or self.summary)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary or an ending, or is a launch after another run."""
        return self.ends_at_launch or bool(self.endings) or (self.launched and self.follows)

    def add(self, row: Row, dialect: str, source: float, line: bytes) -> None:
        """Append an iteration, of that line, printed by the rank or process `source`."""
        # Megatron's own count stays 0 where the loss is NaN:
        # https://github.com/deepspeedai/Megatron-DeepSpeed/pull/434
        row |= self.ahead
        self.ahead = {}
        loss = row.get("lm_loss", 1.0)
        if loss != loss:
            row["nan"] = row.get("nan") or 1.0
        # the Trainer prints 0 for a loss that is NaN
        self.is_nan = loss != loss or (loss == 0 and math.isnan(row.get("grad_norm", 0.0)))
        self.iterations.add(row)
        self.dialects[dialect] += 1
        if self.rank != self.rank:
            self.rank = source
        iteration = row["iteration"]
        self.printed[source] = iteration
        if iteration == iteration:
            self.iteration = iteration
        self.last_line = line

    def timed(self, row: Row, time_s: float) -> Row:
        """The row, with seconds per iteration since the last one, unless it has its own; `time_s`
        is NaN where the line has no time stamp.
        """
        number = row["iteration"]
        if number != number:
            return row
        last, before = self._timed
        steps = number - last
        seconds = time_s - before
        # of stamps cut to whole seconds a shorter time is off by up to a tenth; it counts with the
        # next lines
        is_rounded = time_s % 1 == 0 and 0 <= seconds < SHORT_S
        if last != last or (steps > 0 and not is_rounded):
            self._timed = (number, time_s)
        if "sec_per_it" not in row and steps > 0 and seconds > 0 and not is_rounded:
            row["sec_per_it"] = seconds / steps
        return row

    def accepts(self, row: Row, source: float) -> bool | None:
        """Whether the row is the next of the run; None if it was read before, as several ranks may
        print the same.
        """
        number = row["iteration"]
        before = self.printed.get(source)
        self.printed[source] = number
        if not self.rows or not number <= self.iteration:
            return True
        if source == source:
            # a source that lags behind another one, or begins after it, prints copies
            if before is None and self.rank == self.rank:
                return None
            if before is not None and number > before:
                return None
        is_other = abs(row.get("lm_loss", NAN) - self.iterations.last("lm_loss")) > 0
        if number == self.iteration and not is_other:
            return None
        return False

    def extend(self, printed: Printed, texts: list[tuple[bytes, ...]], source: float) -> None:
        """Append iterations, the last of which is the current one, as `add` would one by one."""
        self.iterations.extend(printed.units, texts)
        self.dialects[printed.dialect] += len(texts)
        self.is_nan = False
        self.printed[source] = self.iteration
        self._timed = (self.iteration, NAN)

    def forget(self) -> None:
        """Forget iterations of WEAK, as another dialect reports them."""
        self.iterations = NumericTable()
        self.dialects.clear()
        self.printed.clear()
        self._timed = (NAN, NAN)
        self.rank = NAN

    def add_timers(self, row: Row) -> None:
        """Add timers in seconds, printed after the last iteration. The last value counts."""
        if self.timers.last("iteration") == self.iteration:
            self.timers.change_last(row)
        else:
            self.timers.add({"iteration": self.iteration, **row})

    def add_validation(self, row: Row) -> None:
        """Add an evaluation, which several ranks may print."""
        number = row.get("iteration", self.iteration)
        if not self.validation.last("iteration") >= number:
            self.validation.add({"iteration": number, **row})

    def add_memory(self, report: Row) -> None:
        """Keep the most bytes that any rank reported."""
        for name in MEMORY:
            if report.get(name, -1.0) > self.memory.get(name, -1.0):
                self.memory[name] = report[name]

    def add_ending(self, new: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not
        continue after, with the nodes at fault of all.
        """
        self.endings = [old for old in self.endings if not superseded(old, self.rows)]
        for place, old in enumerate(self.endings):
            if (old.level, old.status) == (new.level, new.status):
                self.endings[place] = joined(old, new)
                return
        self.endings.append(new)


class Runs:
    """The runs of a file, of which the last is the current one.

    Most iterations follow one of the same columns from the same source. These are kept as text, and
    become numbers column by column, before anybody looks at the run.
    """

    def __init__(self) -> None:
        self.current = PartialRun()  # perhaps without its last iterations
        self.all = [self.current]
        self._units: dict[tuple[str, tuple[Unit, ...]], tuple[Unit, ...]] = {}
        self._texts: list[tuple[bytes, ...]] = []
        # what the next iteration must be like to be kept: as the one before, and its source
        self._before: Printed | None = None
        self._source = b""

    @property
    def run(self) -> PartialRun:
        """The current run with all its iterations."""
        self.add_texts()
        return self.current

    def add_texts(self) -> None:
        """Give the current run its iterations that are kept as text."""
        if self._texts and self._before:
            self.current.extend(self._before, self._texts, float(self._source or NAN))
            self._texts = []

    def printed(self, dialect: Dialect, spans: Iterable[Span], line: bytes) -> Printed | None:
        """How iterations of the form of `line` are kept; None for those that are read at once."""
        spans = sorted(spans, key=lambda span: span.column != "iteration")
        columns = [span.column for span in spans]
        texts = b"".join(line[span.start : span.stop] for span in spans)
        is_plain = not texts.translate(None, b"0123456789.+-eE")
        is_once = len({*columns}) == len(columns) and not READ_AT_ONCE & {*columns}
        has_both = {"iteration", "sec_per_it"} <= {*columns}
        if not (is_plain and is_once and has_both) or dialect.name == STEPS:
            return None
        units = tuple((span.column, span.multiplier, span.divisor) for span in spans)
        cut = itemgetter(*(slice(span.start, span.stop) for span in spans))
        units = self._units.setdefault((dialect.name, units), units)
        return Printed(dialect.name, units, cut, source(line))

    def keep(self, printed: Printed, line: bytes) -> bool:
        """Keep an iteration as text, if it is the next after one like it."""
        before = self._before
        if before is None or before.units is not printed.units or self.current.ahead:
            return False
        texts = printed.texts(line)
        iteration = float(texts[0])
        if iteration <= self.current.iteration or line[printed.source] != self._source:
            return False
        self.current.iteration = iteration
        self.current.last_line = line
        self._texts.append(texts)
        if len(self._texts) >= MAX_TEXTS:
            self.add_texts()
        return True

    def ignores(self, dialect: Dialect) -> bool:
        """Whether `step` would not read an iteration of that dialect."""
        is_other = dialect.name == STEPS and self._before is not None
        return is_other and "skipped" in self.current.iterations.columns

    def take(self, row: Row, dialect: Dialect, line: bytes, printed: Printed | None = None) -> None:
        """Give an iteration of a dialect, all of whose lines were read, to its run."""
        run = self.run
        rate = row.pop("iterations_per_second", 0.0)
        if rate > 0:
            row.setdefault("sec_per_it", 1 / rate)
        time_s = row.get("time_s", NAN)
        if "time_s" not in row and "sec_per_it" not in row:
            time_s = timestamp(line)
        named = line[source(line)]
        printed_by = float(named or NAN)
        is_drawn = dialect.lines in ("bar", "block")
        is_later = row.get("epoch", NAN) > run.iterations.last("epoch")
        is_again = run.iteration == row["iteration"] and not is_later
        if is_drawn and run.dialects.keys() == {dialect.name} and is_again:
            # drawn again with its loss after that of the one before, by the rank that counts
            if printed_by == run.rank or printed_by != printed_by:
                run.iterations.change_last(row)
            return
        self.step(row, dialect.name, time_s, line, printed_by)
        if self.run.dialects[dialect.name]:
            self.run.first_iteration = dialect.first_iteration
        self.run.add_memory(row)
        if printed and self.run.dialects[dialect.name]:
            self._before = printed
            self._source = named

    def step(self, row: Row, dialect: str, time_s: float, line: bytes, source: float = NAN) -> None:
        """Add an iteration that the rank or process `source` printed at a time: the next of the
        run, another rank's copy, or the first of another run.
        """
        run = self.run
        if dialect in WEAK and not row["iteration"]:
            return  # nothing is trained yet
        counted = {name for name, rows in run.dialects.items() if rows}
        before = max(map(_strength, counted), default=_strength(dialect))
        if _strength(dialect) < before:
            if "skipped_total" in row and "skipped" not in run.iterations.columns:
                run.iterations.change_last({"skipped_total": row["skipped_total"]})
            return
        if _strength(dialect) > before:
            run.forget()
            counted = set()
        self._before = None
        is_next = run.accepts(row, source)
        if counted and dialect not in counted:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            is_next = False
            if run.iteration == row["iteration"]:
                is_next = None
        if is_next is None:
            run.dialects[dialect] += 0
            run.iterations.fill(row)  # only the last stage has a loss
            return
        if not is_next:
            self.begin()
        self.run.add(self.run.timed(row, time_s), dialect, source, line)

    def launch(self) -> None:
        """Begin another run where the current one has begun or ended."""
        self.begin()
        self.run.launched = True

    def begin(self) -> None:
        """Begin another run, unless the current one has nothing yet."""
        if self.run.ends_at_launch:
            count = len(self.all)
            require(count < MAX_RUNS, "log", f"{count} runs", "its iterations do not rise")
            self._before = None
            self.current = PartialRun(follows=True)
            self.all.append(self.current)


def _strength(dialect: str) -> int:
    return WEAK.index(dialect) if dialect in WEAK else len(WEAK)
