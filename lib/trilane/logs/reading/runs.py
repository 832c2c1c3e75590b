"""The runs of a log while it is read: what was read of each, and whether an iteration is the next
of a run, a copy of another rank's, or the first of another run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trilane.logs.arguments import Value
from trilane.logs.dialects import Dialect
from trilane.logs.endings import Ending, Level, joined, superseded
from trilane.logs.places import Places
from trilane.logs.prefixes import rank, source, timestamp
from trilane.logs.table import NAN, NumericTable
from trilane.logs.watchdog import Watchdogs
from trilane.utils.validation import require

DIGITS = bytes.maketrans(b"123456789", b"000000000")
MAX_RUNS = 10_000  # of a file
SHORT_S = 20.0  # which stamps of whole seconds give to 5 %, and their median to 1 %
DATES_S = 1e8  # seconds since 1970 are more, those since the start of a run are fewer
MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved")
SAME = (
    "lm_loss",
    "sec_per_it",
    "consumed_samples",
    "epoch",
)  # are equal in two lines of one iteration


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU in the table of nvidia-smi, or in its list, which has no memory (NaN)."""

    index: int
    name: str
    total_bytes: float


class PartialRun:
    """What was read of a run so far. Tables grow by 8 bytes a number; everything else is bounded by
    the number of ranks and names.
    """

    def __init__(self, follows: bool = False) -> None:
        self.iterations, self.companion = NumericTable(), NumericTable()
        self.timers, self.validation = NumericTable(), NumericTable()
        self.memory: dict[int, dict[str, float]] = {}
        self.memory_is_late = False  # whether it was reported after an iteration
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.notes: list[str] = []
        self.own: list[str] = []
        self.follows, self.launched = (
            follows,
            False,
        )  # a run before it in the file; whether its launch was read
        self.endings: list[Ending] = []
        self.watchdogs = Watchdogs()
        self.places = Places()
        self.iteration = 0.0  # the number of the last one, 0 before the first
        self.first_iteration = 1  # what the program calls its first iteration
        self.last_line = b""  # of an iteration
        self._timed: dict[
            str, tuple[float, float]
        ] = {}  # by dialect, the last iteration and its time
        self.timed_by_stamps: set[str] = set()  # dialects whose seconds are differences of times
        self.rank = NAN  # that prints the iterations, if known
        self.printed: dict[float, float] = {}  # the last iteration of each source (NaN: not named)

    @property
    def table(self) -> NumericTable:
        """Its iterations, by DeepSpeed's own steps where nothing else prints any."""
        return self.iterations if self.iterations.rows else self.companion

    @property
    def rows(self) -> int:
        """How many iterations were read."""
        return self.table.rows

    @property
    def ends_at_launch(self) -> bool:
        """Whether a launch seen now begins another run."""
        ended = (Level.SCHEDULER, Level.OUTSIDE, Level.WRAPPER, Level.LAUNCHER)
        return bool(self.rows or self.summary) or any(e.level in ended for e in self.endings)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary or an ending, or is a launch after another run."""
        return self.ends_at_launch or bool(self.endings) or (self.launched and self.follows)

    def add(self, row: dict[str, float], dialect: str, source: float, line: bytes) -> None:
        """Append an iteration, of that line, printed by the rank or process `source`."""
        # a loss that is printed as NaN counts; of one that is not printed the norm tells, where no
        # step was skipped. Megatron's own count stays 0 then:
        # https://github.com/deepspeedai/Megatron-DeepSpeed/pull/434
        value = row.get("lm_loss" if "lm_loss" in row or row.get("skipped") else "grad_norm", 0.0)
        self.iterations.add(row if value == value else {**row, "nan": row.get("nan") or 1.0})
        self.dialects[dialect] += 1
        if self.rank != self.rank:
            self.rank = source
        self.printed[source] = iteration = row["iteration"]
        if iteration == iteration:
            self.iteration = iteration
        self.last_line = line

    def timed(self, row: dict[str, float], time_s: float, dialect: str) -> dict[str, float]:
        """The row, with seconds per iteration since the last of that dialect, unless it has its
        own; `time_s` is NaN where the line has no time stamp.
        """
        if (number := row["iteration"]) != number:
            return row
        last, before = self._timed.get(dialect, (number, NAN))
        if (time_s > DATES_S) != (before > DATES_S) and before == before:
            time_s = NAN  # a date after times that passed since a start
        steps, seconds = number - last, time_s - before
        # of stamps cut to whole seconds a shorter time is off by up to a tenth; it counts with the
        # next lines
        is_rounded = time_s % 1 == 0 and 0 <= seconds < SHORT_S
        if (steps > 0 and not is_rounded) or dialect not in self._timed:
            self._timed[dialect] = (number, time_s)
        if "sec_per_it" not in row and steps > 0 and seconds > 0 and not is_rounded:
            self.timed_by_stamps.add(dialect)
            row["sec_per_it"] = seconds / steps
        return row

    def accepts(self, row: Mapping[str, float], source: float) -> bool | None:
        """Whether the row is the next of the run; None if it was read before, as several ranks may
        print the same.
        """
        number, table, before = row["iteration"], self.iterations, self.printed.get(source)
        self.printed[source] = number
        if not table.rows or not number <= self.iteration:
            return True
        # a source that lags behind another one, or begins after it, prints copies
        if source == source and (number > before if before is not None else self.rank == self.rank):
            return None
        same = all(
            row[n] == table.last(n) or row[n] != row[n] for n in SAME if n in row and n in table
        )
        return None if number == self.iteration and same else False

    def add_companion(self, row: dict[str, float], time_s: float, line: bytes) -> None:
        """Add DeepSpeed's own step, which counts as an iteration only where no other dialect
        reports any.
        """
        table, skipped = self.companion, row.get("skipped_total", NAN)
        if self.iterations.rows:
            if skipped == skipped and "skipped" not in self.iterations:
                self.iterations.change_last({"skipped_total": skipped})
        elif table.last("iteration") == row["iteration"]:
            table.change_last(row)
        else:
            table.add(self.timed(row, time_s, "deepspeed"))
            self.iteration, self.last_line = row["iteration"], line

    def restarts(self, row: Mapping[str, float]) -> bool:
        """Whether DeepSpeed's step shows that another run has begun."""
        return not self.iterations.rows and row["iteration"] < self.companion.last("iteration")

    def add_timers(self, row: dict[str, float]) -> None:
        """Add timers in seconds, printed after the last iteration. The last value counts."""
        if self.timers.last("iteration") == self.iteration:
            self.timers.change_last(row)
        else:
            self.timers.add({"iteration": self.iteration, **row})

    def add_validation(self, row: Mapping[str, float]) -> None:
        """Add an evaluation, which several ranks may print."""
        number = row.get("iteration", self.iteration)
        if not self.validation.last("iteration") >= number:
            self.validation.add({"iteration": number, **row})

    def add_memory(
        self, report: Mapping[str, float], rank: float, names: Iterable[str] = ()
    ) -> None:
        """Update the memory of a rank (NaN: unnamed, counts as 0): the current bytes, and the most
        it ever reported; by all of a report, or those `names` of an iteration.
        """
        number = report.get("rank", 0.0 if rank != rank else rank)
        if (row := self.memory.get(int(number))) is None:
            row = self.memory[int(number)] = {"rank": number, "iteration": self.iteration}
        self.memory_is_late |= self.rows > 0
        for name in names or report:
            if report[name] > row.get(name, -1.0) or not name.startswith("max_"):
                row[name] = report[name]

    def add_ending(self, found: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not
        continue after, with the nodes at fault of all.
        """
        self.endings = [e for e in self.endings if not superseded(e, self.rows)]
        for place, e in enumerate(self.endings):
            if (e.level, e.status) == (found.level, found.status):
                self.endings[place] = joined(e, found)
                return
        self.endings.append(found)


class Runs:
    """The runs of a file, of which the last is the current one."""

    def __init__(self, every: Sequence[Dialect]) -> None:
        self._families = {name: d.family for d in every for name in d.family}
        self.all = [PartialRun()]
        self._launches = set[bytes]()  # forms of lines of the current run's launch

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self.all[-1]

    def take(self, row: dict[str, float], dialect: Dialect, name: str, line: bytes) -> None:
        """Give an iteration of a dialect, all of whose lines were read, to its run."""
        run = self.run
        if (rate := row.pop("iterations_per_second", 0.0)) > 0:
            row.setdefault("sec_per_it", 1 / rate)
        time_s = row.get("time_s", NAN if "sec_per_it" in row else timestamp(line))
        for column, text in dialect.absent.items():
            if row.get(column) == float(text):
                del row[column]
        is_drawn = dialect.lines in ("bar", "block")
        if is_drawn and run.dialects.keys() == {dialect.name} and self._repeats(row):
            # drawn again with its loss after that of the one before, by the rank that counts; later
            if (printed := source(line)) == run.rank or printed != printed:
                run.iterations.change_last(row)
            return
        name = name or next(iter(run.dialects.keys() & dialect.family), dialect.name)
        self.step(run.timed(row, time_s, name), name, line, source(line))
        self.run.first_iteration = dialect.first_iteration
        if held := [column for column in MEMORY if column in row]:
            self.run.add_memory(row, rank(line), held)

    def step(self, row: dict[str, float], dialect: str, line: bytes, source: float = NAN) -> None:
        """Add an iteration that the rank or process `source` printed: the next of the run, another
        rank's copy, or the first of another run.
        """
        run = self.run
        others = run.dialects.keys() - {"deepspeed"}
        takes = run.accepts(row, source)
        counts = {name for name in others if run.dialects[name]}
        family = self._families.get(dialect, frozenset())
        if counts and dialect not in counts and not others <= family:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            takes = None if run.iteration == row["iteration"] else False
        if takes is None:
            if len(family) == 1:
                run.dialects[dialect] += 0
                run.iterations.fill(row["iteration"], row)  # only the last stage has a loss
            return
        if not takes:
            self.begin()
        self.run.add(row, dialect, source, line)

    def launch(self, line: bytes) -> None:
        """Read a line of a launch: of another run where the current one has begun, or has failed
        and repeats it.
        """
        form = line.translate(DIGITS)
        self.begin(again=bool(self.run.endings) and form in self._launches)
        self._launches.add(form)
        self.run.launched = True

    def begin(self, again: bool = False) -> None:
        """Begin another run, unless the current one has nothing yet; `again`: its launch failed."""
        if again or self.run.ends_at_launch:
            require(
                len(self.all) < MAX_RUNS,
                "log",
                f"{len(self.all)} runs",
                "its iterations do not rise",
            )
            self.all.append(PartialRun(follows=True))
            self._launches.clear()

    def _repeats(self, row: Mapping[str, float]) -> bool:
        """Whether the row has the number of the last iteration, and no later epoch."""
        is_later = row.get("epoch", NAN) > self.run.iterations.last("epoch")
        return self.run.iteration == row["iteration"] and not is_later
