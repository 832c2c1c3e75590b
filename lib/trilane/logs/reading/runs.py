"""The runs of a log while it is read: what was read of each, and whether an iteration is the next of a run, a copy of
another rank's, or the first of another run."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trilane.logs.arguments import Value
from trilane.logs.dialects.prefixes import rank, timestamp
from trilane.logs.dialects.tables import Dialect
from trilane.logs.endings import Ending, Level, joined, superseded
from trilane.logs.hardware import Device
from trilane.logs.reading.form import DIGITS, MEMORY
from trilane.logs.table import NAN, NumericTable
from trilane.logs.watchdog import Watchdogs
from trilane.utils.validation import require

MAX_RUNS = 10_000  # of a file
DATES_S = 1e8  # seconds since 1970 are more, those since the start of a run are fewer
REPORTERS = 0.05  # of a loss that two reporters print, such as a bar, which rounds it or averages it: relative
EPOCHS = {"epochs_done": 0.0, "nth_epoch": 1.0}  # where iterations count in their epoch: the number of the first one
SAME = ("lm_loss", "sec_per_it", "consumed_samples", "epoch")  # are equal in two lines of one iteration


class Line(NamedTuple):
    """The first line of an iteration: its text, its number in the file, and the rank or process that printed it."""

    text: bytes
    number: int
    source: float = NAN


class PartialRun:
    """What was read of a run so far. Tables grow by 8 bytes a number; everything else is bounded by the number of ranks
    and names."""

    def __init__(self, follows: bool = False) -> None:
        self.iterations, self.companion, self.timers = NumericTable(), NumericTable(), NumericTable()
        self.bandwidth, self.validation = NumericTable(), NumericTable()
        self.memory: dict[int, dict[str, float]] = {}
        self.memory_is_late = False  # whether it was reported after an iteration
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.notes: list[str] = []
        self.follows, self.launched = follows, False  # a run before it in the file; whether its launch was read
        self.endings: list[Ending] = []
        self.exits: list[Ending] = []  # of tasks, by srun, which names their nodes
        self.watchdogs = Watchdogs()
        self.places: dict[int, tuple[str, str]] = {}  # of ranks: host, and GPU on it
        self.has_launchers = False  # a process on each node that starts its ranks: a task of srun is none of these
        self.root_rank: int | None = None  # of torchrun's table of failures
        self.root_time = ""
        self.iteration, self.first = 0.0, NAN  # the number of the last one (0 before the first), and of the first
        self.first_iteration = 1  # what the program calls its first iteration
        self.in_epochs = False  # whether the log numbers them in their epoch: it may have more epochs
        self.epochs_before = 0.0  # iterations of the earlier epochs
        self.last_line, self.first_number, self.last_number = b"", 0, 0  # of iterations; numbers in the file, 0: none
        self.stamps: list[tuple[float, float]] = []  # iteration and time of some lines
        self._next_stamp = 0  # rows from which the next line's time is noted
        self._timed: dict[str, tuple[float, float]] = {}  # by dialect, the last iteration and its time
        self.timed_by_stamps: set[str] = set()  # dialects whose seconds are differences of times
        self._is_numbered = False  # whether DeepSpeed prints the numbers of its steps
        self.steady = ""  # the dialect whose next iteration simply continues the run
        self.first_line = b""
        self.unread, self.first_unread = 0, (0, b"")  # lines of another reporter; number and text of the first
        self.rank = NAN  # that prints the iterations, if known
        self.printed: dict[float, float] = {}  # the last iteration of each source (NaN: not named)
        self.lost: list[float] = []  # iterations of lines that were left out as copies of lines that are not there
        self.differing: tuple[float, float, float] | None = None  # the first iteration with two losses, and these

    @property
    def clock(self) -> tuple[tuple[float, float], ...]:
        """Iteration and seconds since 1970 of the first, the last and some lines between, by their own stamps."""
        last = (self.iteration, timestamp(self.last_line)) if self.rows else (NAN, NAN)
        return tuple(dict.fromkeys(pair for pair in (*self.stamps, last) if pair[1] == pair[1]))

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
        return bool(self.rows or self.summary or self.bandwidth.rows) or any(e.level in ended for e in self.endings)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary, a benchmark or an ending, or is a launch after another run."""
        return self.ends_at_launch or bool(self.endings) or (self.launched and self.follows)

    def forget(self) -> None:
        """Leave out the iterations read so far, which were not what they looked like."""
        self.iterations, self.iteration, self.steady = NumericTable(), 0.0, ""
        self.first_number = self.last_number = self._next_stamp = 0
        self.stamps.clear()
        self.dialects.clear()

    def add(self, row: dict[str, float], dialect: str, source: float, line: bytes, number: int) -> None:
        """Append an iteration, of the line of that number in the file, printed by the rank or process `source`."""
        loss = row.get("lm_loss", 0.0)
        # a loss that is printed as NaN counts; one that is not printed is not known
        self.iterations.add(row if loss == loss else {"nan": 1.0, **row})
        self.dialects[dialect] += 1
        if self.rank != self.rank:
            self.rank = source
        self.printed[source] = iteration = row["iteration"]
        self.saw(iteration, line, number, self.iterations.rows)

    def saw(self, iteration: float, line: bytes, number: int, rows: int) -> None:
        """Note the line of the iteration that was added last, and its number in the file."""
        if iteration == iteration:
            self.iteration = iteration
        self.last_line, self.last_number = line, number
        if rows >= self._next_stamp:
            if not self.first_number:
                self.first_number, self.first, self.first_line = number, iteration, line
            self.stamps.append((iteration, timestamp(line)))
            if len(self.stamps) > 50:
                del self.stamps[1::2]
            self._next_stamp = rows + max(1, rows // 25)

    def timed(self, row: dict[str, float], time_s: float, dialect: str) -> dict[str, float]:
        """The row, with seconds per iteration since the last of that dialect, unless it has its own; `time_s` is NaN
        where the line has no time stamp."""
        if (number := row["iteration"]) != number:
            return row
        last, before = self._timed.get(dialect, (number, NAN))
        if (time_s > DATES_S) != (before > DATES_S) and before == before:
            time_s = NAN  # a date after times that passed since a start
        steps, seconds = number - last, time_s - before
        if (steps > 0 and seconds != 0) or dialect not in self._timed:  # several steps may share a whole second
            self._timed[dialect] = (number, time_s)
        if "sec_per_it" not in row and steps > 0 and seconds > 0:
            self.timed_by_stamps.add(dialect)
            row["sec_per_it"] = seconds / steps
        return row

    def accepts(self, row: Mapping[str, float], source: float) -> bool | None:
        """Whether the row is the next of the run; None if it was read before, as several ranks may print the same."""
        number, last, before = row["iteration"], self.iterations.recent[-1:], self.printed.get(source)
        self.printed[source] = number
        if not last or not number <= self.iteration:
            return True
        # a source that lags behind another one, or begins after it, prints copies
        if source == source and (number > before if before is not None else self.rank == self.rank):
            return None
        same = all(
            row[n] == last[0].get(n, NAN) or row[n] != row[n] for n in SAME if n in row and n in self.iterations.names
        )
        return None if number == self.iteration and same else False

    def compare(self, row: Mapping[str, float], tolerance: float = 1e-6) -> None:
        """Note a line that was left out as another rank's or reporter's copy, where there is no line of its number, or
        its loss is another one (`tolerance`: relative)."""
        number, known = row["iteration"], self.iterations.find(row["iteration"])
        if known is None and not (self.iterations.columns()["iteration"] == number).any():
            self.lost += [number] * (len(self.lost) < 100)
        elif known and {"lm_loss"} <= known.keys() & row.keys() and not self.differing:
            one, other = known["lm_loss"], row["lm_loss"]
            if abs(one - other) > tolerance * abs(one):
                self.differing = (number, one, other)

    def complete(self, row: dict[str, float]) -> None:
        """Add what another rank or reporter prints for an iteration already read: only the last stage has a loss."""
        if known := self.iterations.find(row["iteration"]):
            self.iterations.change(known, {n: v for n, v in row.items() if known.get(n, NAN) != known.get(n, NAN)})

    def leave_out(self, row: Mapping[str, float], line: bytes, number: int) -> None:
        """Note a line that looks like another iteration than the last, in a run that others print."""
        if row["iteration"] != self.iteration and "val_loss" not in row:
            self.first_unread = self.first_unread if self.unread else (number, line)
            self.unread += 1

    def add_companion(self, row: dict[str, float], time_s: float, line: bytes, number: int) -> None:
        """Add DeepSpeed's own numbers, a row for each iteration; used only where no other dialect reports any.

        Steps counted since the start of the process are iterations where nothing else numbers them; else their rate is
        that of the last iteration.
        """
        table, since, skipped = self.companion, row.pop("since_start", None), row.get("skipped_total", NAN)
        if self.iterations.rows:
            if skipped == skipped and "skipped" not in self.iterations.names:
                self.iterations.change_last({"skipped_total": skipped})
        elif since is not None and self._is_numbered:
            table.change_last(row)
            self.last_line = line
        else:
            row = row if since is None else {"iteration": since, **row}
            if since is None and not self._is_numbered and table.last("iteration") != row["iteration"]:
                table = self.companion = NumericTable()  # a resumed run: its rates alone were counted so far
                self._timed.pop("deepspeed", None)
            self._is_numbered |= since is None
            row = self.timed(row, time_s, "deepspeed")
            if table.last("iteration") == row["iteration"]:
                table.change_last(row)
            else:
                table.add(row)
            self.saw(row["iteration"], line, number, table.rows)

    def restarts(self, row: Mapping[str, float]) -> bool:
        """Whether DeepSpeed's numbers show that another run has begun."""
        is_number = not self._is_numbered or "since_start" not in row
        return (
            is_number
            and not self.iterations.rows
            and row.get("iteration", row.get("since_start", NAN)) < self.companion.last("iteration")
        )

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

    def add_memory(self, report: Mapping[str, float], rank: float, names: Iterable[str] = ()) -> None:
        """Update the memory of a rank (NaN: unnamed, counts as 0): the current bytes, and the most it ever reported;
        by all of a report, or those `names` of an iteration."""
        number = report.get("rank", 0.0 if rank != rank else rank)
        if (row := self.memory.get(int(number))) is None:
            row = self.memory[int(number)] = {"rank": number, "iteration": self.iteration}
        self.memory_is_late |= self.last_number > 0
        for name in names or report:
            if report[name] > row.get(name, -1.0) or not name.startswith("max_"):
                row[name] = report[name]

    def add_ending(self, found: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not continue after, with the
        nodes at fault of all."""
        self.steady = ""
        self.endings = [e for e in self.endings if not superseded(e, self.rows)]
        self.exits = [e for e in self.exits if not superseded(e, self.rows)]
        if (
            found.level == Level.OUTSIDE
            and found.hosts
            and "srun: error: " in found.evidence
            and len(self.exits) < 1000
        ):
            self.exits.append(found)
        for place, e in enumerate(self.endings):
            if (e.level, e.status) == (found.level, found.status):
                self.endings[place] = joined(e, found)
                return
        self.endings.append(found)


class Runs:
    """The runs of a file, of which the last is the current one; `number` is that of the current line."""

    def __init__(self, every: Sequence[Dialect]) -> None:
        self._guesses = {dialect.name for dialect in every if dialect.fallback}
        self._families = {name: d.family for d in every for name in d.family}
        self.all = [PartialRun()]
        self.number = 0
        self._launches = set[bytes]()  # forms of lines of the current run's launch

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self.all[-1]

    def take(
        self, row: dict[str, float], dialect: Dialect, name: str, time_s: float, line: Line, is_plain: bool = False
    ) -> None:
        """Give an iteration of a dialect, all of whose lines were read, to its run."""
        run = self.run
        row = self._in_run(row)
        if (rate := row.pop("iterations_per_second", 0.0)) > 0:
            row.setdefault("sec_per_it", 1 / rate)
        time_s = row.get("time_s", time_s)
        for column, text in dialect.absent.items():
            if row.get(column) == float(text):
                del row[column]
        if dialect.fallback:
            if not run.dialects.keys() <= {dialect.name}:
                return
            row = self._counted_on(row)
            if self._evaluates(row):
                return
        is_drawn = dialect.lines in ("bar", "block") or dialect.fallback
        if is_drawn and run.dialects.keys() == {dialect.name} and self._repeats(row):
            self._draw_again(run.timed(row, time_s, dialect.name), line.source, dialect)
            return
        name = name or next(iter(run.dialects.keys() & dialect.family), dialect.name)
        self.step(run.timed(row, time_s, name), name, line)
        run = self.run
        run.first_iteration = dialect.first_iteration
        is_alone = run.dialects.keys() <= {name, "deepspeed"} and not run.endings
        run.steady = name if is_plain and is_alone and not (is_drawn or run.in_epochs) else ""
        if held := [column for column in MEMORY if column in row]:
            run.add_memory(row, rank(line.text), held)

    def step(self, row: dict[str, float], dialect: str, line: Line) -> None:
        """Add an iteration: the next of the run, another rank's copy, or the first of another run."""
        self.settle(dialect)
        run = self.run
        others = run.dialects.keys() - {"deepspeed"}
        takes = run.accepts(row, line.source)
        counts = {name for name in others if run.dialects[name]}
        family = self._families.get(dialect, frozenset())
        if counts and dialect not in counts and not others <= family:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            takes = None if run.iteration == row["iteration"] else False
        if takes is None:
            run.compare(row, 1e-6 if dialect in counts else REPORTERS)
            if len(family) == 1:
                run.dialects[dialect] += 0
                run.complete(row)
            return
        if not takes:
            self.begin()
        self.run.add(row, dialect, line.source, line.text, line.number)

    def settle(self, dialect: str) -> None:
        """Leave out what fallbacks have read of the run, where a line of another dialect shows whose it is."""
        if dialect not in self._guesses and not self._guesses.isdisjoint(self.run.dialects):
            run = self.run
            run.unread, run.first_unread = run.rows, (run.first_number, run.first_line)
            run.forget()

    def launch(self, line: bytes) -> None:
        """Read a line of a launch: of another run where the current one has begun, or has failed and repeats it."""
        form = line.translate(DIGITS)
        self.begin(again=bool(self.run.endings) and form in self._launches)
        self._launches.add(form)
        self.run.launched = True

    def begin(self, again: bool = False) -> None:
        """Begin another run, unless the current one has nothing yet; `again`: its launch failed."""
        if again or self.run.ends_at_launch:
            require(len(self.all) < MAX_RUNS, "log", f"{len(self.all)} runs", "its iterations do not rise")
            self.all.append(PartialRun(follows=True))
            self._launches.clear()

    def _repeats(self, row: Mapping[str, float]) -> bool:
        """Whether the row has the number of the last iteration, and no later epoch."""
        is_later = row.get("epoch", NAN) > self.run.iterations.last("epoch")
        return self.run.iteration == row["iteration"] and not is_later

    def _draw_again(self, row: dict[str, float], printed: float, dialect: Dialect) -> None:
        """Read a bar that is drawn again at the same iteration: with its loss after the loss of the one before, which
        counts; or, where it had its loss, for a part of the batch or by another rank, which is noted."""
        run, is_copy = self.run, dialect.fallback and not dialect.lines
        before, *_, last = [one.get("lm_loss") for one in run.iterations.recent[-2:] * 2]
        if is_copy or (before != last and run.iterations.rows > 1):
            run.compare(row)
        if not is_copy and (printed == run.rank or printed != printed):
            run.iterations.change_last(row)

    def _in_run(self, row: dict[str, float]) -> dict[str, float]:
        """The row with the iteration's number in the run, where it has that in its epoch."""
        for column in EPOCHS.keys() & row:
            self.run.in_epochs = True
            done = row["epoch"] = row.pop(column) - EPOCHS[column]
            if "train_iters" in row:
                row["iteration"] += done * row["train_iters"]
                row["train_iters"] *= done + 1  # as far as is known: the number of epochs is not
        return row

    def _counted_on(self, row: dict[str, float]) -> dict[str, float]:
        """The row of a fallback with the number in the run, where numbers have begun anew with an epoch."""
        run = self.run
        last, epoch, total = run.iteration, run.iterations.last("epoch"), row.get("train_iters", 0.0)
        if total > 0 and row.get("epoch", 0.0) > epoch and row["iteration"] + run.epochs_before <= last:
            run.epochs_before, run.in_epochs = math.ceil(last / total) * total, True
        if run.epochs_before and row.get("epoch", 0.0) >= epoch:
            row["iteration"] += run.epochs_before
            row["train_iters"] = run.epochs_before + total
        return row

    def _evaluates(self, row: dict[str, float]) -> bool:
        """Whether the row of a fallback is an evaluation, which is added: it has a loss of held-out text, and other
        rows have none."""
        run, table = self.run, self.run.iterations
        if not table.rows or ("val_loss" in row) == ("val_loss" in table.names):
            return False
        held_out = [row] if "val_loss" in row else table.recent  # all that was read so far were evaluations
        if "val_loss" not in row:
            run.forget()
        for one in held_out:
            run.add_validation({"iteration": one["iteration"], "lm_loss": one["val_loss"]})
        return "val_loss" in row
