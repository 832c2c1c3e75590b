"""PartialRun: one run while its log is being read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.dialects.prefixes import NAN, line_time
from trilane.logs.endings import LAUNCHER, MOST_GPUS, OUTSIDE, SCHEDULER, WRAPPER, Ending, joined, superseded
from trilane.logs.hardware import Device
from trilane.logs.table import NumericTable
from trilane.logs.watchdog import Watchdogs

MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved")
DATES_S = 1e8  # seconds since 1970 are more, those since the start of a run are fewer


class PartialRun:
    """What was read of a run so far. Tables grow by 8 bytes a number; everything else is bounded by the number of ranks
    and names."""

    def __init__(self, follows: bool = False) -> None:
        self.iterations, self.companion, self.timers = NumericTable(), NumericTable(), NumericTable()
        self.bandwidth, self.validation = NumericTable(), NumericTable()
        self.memory: dict[int, dict[str, float]] = {}
        self.memory_rows = 0  # iterations before the last report of memory
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.endings: list[Ending] = []
        self.exits: list[Ending] = []  # of tasks, by srun, which names their nodes
        self.iteration = 0.0  # the number of the last one, 0 before the first
        self.rank = NAN  # that prints the iterations, if known
        self.in_epochs = False  # whether the log numbers them in their epoch: it may have more epochs
        self.notes: list[str] = []
        self.has_launchers = False  # a process on each node that starts its ranks: a task of srun is none of these
        self.root_rank: int | None = None
        self.root_time = ""  # when it failed, as torchrun prints it
        self.first_iteration = 1  # what the program calls its first iteration
        self.watchdogs = Watchdogs()
        self.places: dict[int, tuple[str, str]] = {}  # of ranks: host, and GPU on it
        self.copies = Copies()
        self.previous: PartialRun | None = None  # the run that these lines may belong to
        self.steady = ""  # the dialect whose next iteration simply continues the run
        self.follows = follows  # whether another run stands before it in the file
        self.launched = False  # whether a line of its launch was read
        self.last_line, self.first_number, self.last_number = b"", 0, 0  # of iterations; numbers in the file, 0: none
        self.stamps: list[tuple[float, float]] = []  # iteration and time of some lines
        self._next_stamp = 0  # rows from which the next line's time is noted
        self._timed: dict[str, tuple[float, float]] = {}  # by dialect, the last iteration and its time
        self.timed_by_stamps: set[str] = set()  # dialects whose seconds are differences of times
        self._counts: dict[str, float] = {}  # the last number of each way in which DeepSpeed counts

    @property
    def clock(self) -> tuple[tuple[float, float], ...]:
        """Iteration and time (see line_time) of the first, the last and some lines between, by their own stamps."""
        last = (self.iteration, line_time(self.last_line)) if self.rows else (NAN, NAN)
        return tuple(dict.fromkeys(pair for pair in (*self.stamps, last) if pair[1] == pair[1]))

    @property
    def rows(self) -> int:
        """How many iterations were read."""
        return self.iterations.rows or self.companion.rows

    def rank_of(self, end: Ending | None) -> int | None:
        """The rank that an ending is about, None where it is unknown: the task of srun only where a task is a rank, the
        number on a node only where the run has one node."""
        if end is None or end.rank is None:
            return self.root_rank if end else None
        if end.among == "task" and self.has_launchers:
            return self.root_rank
        world = self.arguments.get("world_size")
        ranks = max(self.watchdogs.world, world if isinstance(world, int) else 0)
        if end.among == "node" and (ranks > MOST_GPUS or len({host for host, _ in self.places.values()}) > 1):
            return self.root_rank
        return end.rank

    @property
    def ends_at_launch(self) -> bool:
        """Whether a launch seen now begins another run."""
        ended = (SCHEDULER, OUTSIDE, WRAPPER, LAUNCHER)
        return bool(self.rows or self.summary or self.bandwidth.rows) or any(e.level in ended for e in self.endings)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary, a benchmark or an ending, or is a launch after another run."""
        return self.ends_at_launch or bool(self.endings) or (self.launched and self.follows)

    @property
    def may_be_delayed(self) -> bool:
        """Whether its few iterations may be output of the run before it, which SLURM was ending: KillWait is 30 s."""
        few, known = self.iterations.rows <= 1000, "sec_per_it" in self.iterations
        return few and not (known and np.nansum([*map(self._seconds, range(self.iterations.rows))]) > 60)

    def _seconds(self, place: int) -> float:
        return self.iterations.at("sec_per_it", place)

    def absorb(self, late: "PartialRun") -> None:
        """Append the content of another run, which turned out to be delayed output of this one."""
        ends = [replace(e, rows=e.rows + self.rows) for e in late.endings]
        for name in ("iterations", "timers", "validation"):
            getattr(self, name).append(getattr(late, name))
        self.dialects += late.dialects
        self.iteration, self.last_line, self.last_number = late.iteration, late.last_line, late.last_number
        self.has_launchers |= late.has_launchers
        self.root_rank = self.root_rank if self.root_rank is not None else late.root_rank
        for name in ("memory", "places", "arguments", "summary"):
            getattr(self, name).update(getattr(late, name))
        self.memory_rows = max(self.memory_rows, late.memory_rows)
        for end in ends:
            self.add_ending(end)

    def forget(self) -> None:
        """Drop the iterations read so far, which were not what they looked like."""
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
        self.copies.printed[source] = iteration = row["iteration"]
        self.saw(iteration, line, number, self.iterations.rows)

    def saw(self, iteration: float, line: bytes, number: int, rows: int) -> None:
        """Note the line of the iteration that was added last, and its number in the file."""
        if iteration == iteration:
            self.iteration = iteration
        self.last_line, self.last_number = line, number
        if rows >= self._next_stamp:
            self.first_number = self.first_number or number
            self.stamps.append((iteration, line_time(line)))
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

    def complete(self, row: dict[str, float]) -> None:
        """Add what another rank or reporter prints for an iteration already read: only the last stage has a loss."""
        table, place = self.iterations, self.iterations.find("iteration", row["iteration"])
        if place is not None:
            table.change(place, {n: v for n, v in row.items() if table.at(n, place) != table.at(n, place)})

    def restarts(self, row: Mapping[str, float]) -> bool:
        """Whether a row of DeepSpeed's, of a run without other iterations, shows that another run has begun."""
        name = "since_start" if "since_start" in row else "iteration"
        return not self.iterations.rows and row[name] < self._counts.get(name, 0.0)

    def add_companion(self, row: dict[str, float], time_s: float, line: bytes, number: int) -> None:
        """Add DeepSpeed's own numbers, a row for each iteration; used only where no other dialect reports any.

        Steps counted since the start of the process are iterations where nothing else numbers them, or both agree;
        else their rate is that of the last iteration.
        """
        if self.iterations.rows:
            skipped = row.get("skipped_total", NAN)
            counted = self.iterations.last("skipped")
            if skipped == skipped and counted != counted:  # nothing else counts them
                self.iterations.change_last({"skipped_total": skipped})
            return
        self.last_line = line
        table, counts, since = self.companion, self._counts, row.pop("since_start", None)
        if since is None:
            if counts.keys() == {"since_start"} and row["iteration"] > 2 * counts["since_start"]:
                table = self.companion = NumericTable()  # a resumed run: its rates alone were counted so far
                self._timed.pop("deepspeed", None)
            counts["iteration"] = row["iteration"]
        else:
            counts["since_start"] = since
            if counts.get("iteration", 0.0) > since:
                table.change_last(row)
                return
            row = {"iteration": since, **row}
        row = self.timed(row, time_s, "deepspeed")
        if table.rows and table.last("iteration") >= row["iteration"]:
            table.change(table.find("iteration", row["iteration"]) or table.rows - 1, row)
        else:
            table.add(row)
        self.saw(table.last("iteration"), line, number, table.rows)

    def add_timers(self, row: dict[str, float]) -> None:
        """Add timers in seconds, printed after the last iteration. The last value counts."""
        if self.timers.rows and self.timers.last("iteration") == self.iteration:
            self.timers.change_last(row)
        else:
            self.timers.add({"iteration": self.iteration, **row})

    def add_validation(self, row: dict[str, float]) -> None:
        """Add an evaluation, which several ranks may print."""
        if not self.validation.rows or self.validation.last("iteration") < row["iteration"]:
            self.validation.add(row)

    def add_memory(self, report: Mapping[str, float], rank: float) -> None:
        """Update the memory of a rank (NaN: unnamed, counts as 0): the current bytes, and the most it ever reported."""
        rank = report.get("rank", 0.0 if rank != rank else rank)
        row = self.memory.setdefault(int(rank), {"rank": rank, "iteration": self.iteration})
        self.memory_rows = self.rows
        for name, value in report.items():
            row[name] = max(row.get(name, 0.0), value) if name.startswith("max_") else value

    def add_memory_of(self, row: Mapping[str, float], columns: Sequence[str], rank: float) -> None:
        """Update the memory of a rank by those columns of an iteration; most report nothing new."""
        known = self.memory.get(0 if rank != rank else int(rank), {})
        for name in columns:
            if not (name.startswith("max_") and row[name] <= known.get(name, -1.0)):
                return self.add_memory({name: row[name] for name in columns}, rank)
        return None

    def add_ending(self, found: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not continue after, with the
        nodes at fault of all."""
        self.steady = ""
        self.endings = [e for e in self.endings if not superseded(e, self.rows)]
        self.exits = [e for e in self.exits if not superseded(e, self.rows)]
        if found.level == OUTSIDE and found.hosts and "srun: error: " in found.evidence and len(self.exits) < 1000:
            self.exits.append(found)
        for place, e in enumerate(self.endings):
            if (e.level, e.status) == (found.level, found.status):
                self.endings[place] = joined(e, found)
                return
        self.endings.append(found)


class Copies:
    """The iterations that several ranks of a run print, which count once.

    printed     the last iteration of each source (NaN: not named)
    lost        numbers of lines that were left out as copies of lines that are not there
    differing   the first iteration with two losses, and these
    """

    def __init__(self) -> None:
        self.printed: dict[float, float] = {}
        self.lost: list[float] = []
        self.differing: tuple[float, float, float] | None = None

    def accepts(self, row: Mapping[str, float], source: float, run: PartialRun) -> bool | None:
        """Whether the row is the next of the run; None if it was read before, as several ranks may print the same."""
        number, table = row["iteration"], run.iterations
        before = self.printed.get(source)
        self.printed[source] = number
        if not table.rows or not number <= run.iteration:
            return True
        # a source that lags behind another one, or begins after it, prints copies
        if source == source and (number > before if before is not None else run.rank == run.rank):
            return None
        known = ("lm_loss", "sec_per_it", "consumed_samples", "epoch")  # are equal in two lines of one iteration
        same = all(row[n] == table.last(n) or row[n] != row[n] for n in known if n in row and n in table)
        return None if number == run.iteration and same else False

    def compare(self, row: Mapping[str, float], table: NumericTable, tolerance: float = 1e-6) -> None:
        """Note a line that was left out as another rank's or reporter's copy, where there is no line of its number, or
        its loss is another one (`tolerance`: relative)."""
        number, place = row["iteration"], table.find("iteration", row["iteration"])
        if place is None and not (table.column("iteration") == number).any():
            self.lost += [number] * (len(self.lost) < 100)
        elif place is not None and "lm_loss" in row and "lm_loss" in table and not self.differing:
            one, other = table.at("lm_loss", place), row["lm_loss"]
            if abs(one - other) > tolerance * abs(one):
                self.differing = (number, one, other)
