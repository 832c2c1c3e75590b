"""PartialRun: one run while its log is being read."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.endings import LAUNCHER, MOST_GPUS, OUTSIDE, SCHEDULER, WRAPPER, Ending, joined, superseded
from trilane.logs.hardware import Device
from trilane.logs.reading.copies import Copies
from trilane.logs.reading.line_clock import LineClock, line_time
from trilane.logs.table import NAN, NumericTable
from trilane.logs.watchdog import Watchdogs

LATE_S = 60.0  # of iterations that may still follow the scheduler's message: SLURM's KillWait is 30 s
ENDED = (SCHEDULER, OUTSIDE, WRAPPER, LAUNCHER)  # levels of endings after which a launch begins another run
MAX_EXITS = 1000  # of tasks
BARE, MOST_BARE = {"iteration", "lm_loss", "sec_per_it", "time_s"}, 3
MAX_LATE = 1000  # iterations, where they have no times


class PartialRun(LineClock):
    """What was read of a run so far; `keep` and `spill` as in NumericTable. Tables grow by 8 bytes a number; everything
    else is bounded by the number of ranks and names."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None, follows: bool = False) -> None:
        super().__init__()
        self._table = partial(NumericTable, keep, spill)
        self.iterations, self.companion = self._table(), self._table()
        self.timers, self.bandwidth = NumericTable(keep), NumericTable()
        self.validation = NumericTable()
        self.memory: dict[int, dict[str, float]] = {}
        self.bare = list[tuple[int, float]]()  # row and number, see look_for_stray
        self.memory_rows = 0  # iterations before the last report of memory
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.endings: list[Ending] = []
        self.exits: list[Ending] = []  # of tasks, by srun, which names their nodes
        self.previous: PartialRun | None = None  # the run that these lines may belong to
        self.rank = NAN  # that prints the iterations, if known
        self._of_deepspeed: dict[str, float] = {}  # the last number of each way in which it counts
        self.counted = False  # whether its iterations are numbered 1, 2, 3 because the log does not number them
        self.in_epochs = False  # whether the log numbers them in their epoch: it may have more epochs
        self.known = list[tuple[int, float]]()  # rows before the first steps that the log does have, and these
        self.notes: list[str] = []
        self.has_launchers = False  # a process on each node that starts its ranks: a task of srun is none of these
        self.root_rank: int | None = None
        self.root_time = ""  # when it failed, as torchrun prints it
        self.first_iteration = 1  # what the program calls its first iteration
        self.watchdogs = Watchdogs()
        self.places: dict[int, tuple[str, str]] = {}  # of ranks: host, and GPU on it
        self.last_line = b""
        self.copies = Copies()
        self.follows = follows  # whether another run stands before it in the file
        self.launched = False  # whether a line of its launch was read

    @property
    def iteration(self) -> float:
        """The number of the last iteration read, 0 before the first."""
        for table in (self.iterations, self.companion):
            if table.rows:
                return table.last("iteration")
        return 0.0

    @property
    def clock(self) -> tuple[tuple[float, float], ...]:
        """Iteration and time (see line_time) of the first, the last and some lines between, by their own stamps."""
        last = (self.iteration, line_time(self.last_line)) if self.rows else (NAN, NAN)
        return tuple(dict.fromkeys(pair for pair in (*self.stamps, last) if pair[1] == pair[1]))

    @property
    def rows(self) -> int:
        """How many iterations were read."""
        return max(self.iterations.rows, self.companion.rows)

    def latest(self, rows: int) -> "PartialRun":
        """A copy that has the last `rows` iterations, for a look at a run that is still read."""
        found = copy(self)
        for name in ("iterations", "companion", "timers", "validation", "bandwidth"):
            setattr(found, name, getattr(self, name).latest(rows))
        return found

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
        return bool(self.rows or self.summary or self.bandwidth.rows) or any(e.level in ENDED for e in self.endings)

    @property
    def ended_by_scheduler(self) -> bool:
        """Whether the scheduler ended it after some iterations; what follows is another run, or delayed output."""
        return bool(self.iterations.rows) and any(e.level == SCHEDULER for e in self.endings)

    @property
    def may_be_delayed(self) -> bool:
        """Whether its few iterations may be delayed output of the previous run, which SLURM was ending."""
        rows, known = self.iterations.rows, "sec_per_it" in self.iterations
        return rows <= MAX_LATE and not (known and np.nansum(self.iterations.column("sec_per_it")) > LATE_S)

    def absorb(self, late: "PartialRun") -> None:
        """Append the content of another run, which turned out to be delayed output of this one."""
        ends = [replace(e, rows=e.rows + self.rows) for e in late.endings]
        self.iterations.append(late.iterations)
        self.timers.append(late.timers)
        self.validation.append(late.validation)
        self.dialects += late.dialects
        self.last_line, self.last_number = late.last_line, late.last_number
        self.has_launchers |= late.has_launchers
        self.root_rank = self.root_rank if self.root_rank is not None else late.root_rank
        self.memory |= late.memory
        self.memory_rows = max(self.memory_rows, late.memory_rows)
        self.places |= late.places
        self.arguments |= late.arguments
        self.summary |= late.summary
        for end in ends:
            self.add_ending(end)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary, a benchmark or an ending, or is a launch after another run."""
        return self.ends_at_launch or bool(self.endings) or (self.launched and self.follows)

    def accepts(self, row: Mapping[str, float], source: float) -> bool | None:
        """Whether the row is the next of this run; None if it was read before, see Copies."""
        return self.copies.accepts(row, source, self.iterations, named=self.rank == self.rank)

    def forget(self) -> None:
        """Drop the iterations read so far, which were not what they looked like."""
        self.iterations, self.bare = self._table(), []
        self.dialects.clear()
        self.forget_lines()

    def repeats(self, row: Mapping[str, float], dialect: str) -> bool:
        """Whether the dialect, alone in the run, printed this iteration last, as a bar that is drawn again."""
        return self.iterations.last("iteration") == row["iteration"] and set(self.dialects) == {dialect}

    def add(self, row: dict[str, float], dialect: str, rank: float, line: bytes) -> None:
        """Append an iteration. A loss that is printed as NaN counts; one that is not printed is not known."""
        loss = row.get("lm_loss", 0.0)
        self.iterations.add(row if loss == loss else {"nan": 1.0, **row})
        self._count(dialect, 1, rank, line)

    def look_for_stray(self, row: Mapping[str, float]) -> None:
        """Note the row, read last, if it has a loss and nothing else but times. The first of a run may lack rates."""
        if self.iterations.rows > 1 and len(self.bare) < MOST_BARE and row.keys() <= BARE:
            self.bare.append((self.iterations.rows - 1, row["iteration"]))

    def extend(self, names: Sequence[str], values: np.ndarray, dialect: str, rank: float, line: bytes) -> None:
        """Append iterations of one dialect, (names, rows); `line` is the last one."""
        self.iterations.extend(names, values)
        self._count(dialect, values.shape[1], rank, line)

    def _count(self, dialect: str, rows: int, rank: float, line: bytes) -> None:
        self.dialects[dialect] += rows
        self.rank = self.rank if self.rank == self.rank else rank
        self.copies.printed[rank] = self.iterations.last("iteration")
        self.last_line = line

    def complete(self, row: dict[str, float]) -> None:
        """Add what another rank or reporter prints for an iteration already read: only the last stage has a loss."""
        table, place = self.iterations, self.iterations.find("iteration", row["iteration"])
        if place is not None:
            table.change(
                place, {n: v for n, v in row.items() if n not in table or table.at(n, place) != table.at(n, place)}
            )

    def restarts(self, row: Mapping[str, float]) -> bool:
        """Whether a row of DeepSpeed's, of a run without other iterations, shows that another run has begun."""
        name = "since_start" if "since_start" in row else "iteration"
        return not self.iterations.rows and row[name] < self._of_deepspeed.get(name, 0.0)

    def add_companion(self, row: dict[str, float], time_s: float, line: bytes) -> None:
        """Add DeepSpeed's own numbers, a row for each iteration; used only where no other dialect reports any.

        Steps counted since the start of the process are iterations where nothing else numbers them, or both agree;
        else their rate is that of the last iteration.
        """
        self.dialects["deepspeed"] += 0
        if self.iterations.rows:
            self.skipped_so_far(row.get("skipped_total", NAN))
            return
        self.last_line, table, seen = line, self.companion, self._of_deepspeed
        since = row.pop("since_start", None)
        if since is None:
            if seen.keys() == {"since_start"} and row["iteration"] > 2 * seen["since_start"]:
                table = self.companion = self._table()  # a resumed run: its rates alone were counted so far
                self._last.pop("deepspeed", None)
            seen["iteration"] = row["iteration"]
        else:
            seen["since_start"] = since
            if seen.get("iteration", 0.0) > since:
                table.change_last(row)
                return
            row = {"iteration": since, **row}
        row = self.timed(row, time_s, "deepspeed")
        if table.rows and table.last("iteration") >= row["iteration"]:
            table.change(table.find("iteration", row["iteration"]) or table.rows - 1, row)
        else:
            table.add(row)

    def skipped_so_far(self, total: float) -> None:
        """Add how many steps DeepSpeed has skipped since the start, to a run whose own lines do not count them."""
        if total == total and "skipped" not in self.iterations:
            self.iterations.change_last({"skipped_total": total})

    def add_timers(self, names: Sequence[str], at: np.ndarray, values: np.ndarray) -> None:
        """Add timers in seconds, (names, rows), printed after the increasing iterations `at`. The last value counts."""
        if len(at) and self.timers.rows and self.timers.last("iteration") == at[0]:
            self.timers.change_last({n: v for n, v in zip(names, values[:, 0], strict=True) if v == v})
            at, values = at[1:], values[:, 1:]
        if len(at):
            self.timers.extend(["iteration", *names], np.vstack([at, values]))

    def add_validation(self, row: dict[str, float]) -> None:
        """Add an evaluation, which several ranks may print."""
        if not self.validation.rows or self.validation.last("iteration") < row["iteration"]:
            self.validation.add(row)

    def add_memory(self, report: Mapping[str, float]) -> None:
        """Update the memory of a rank: the current bytes, and the most that it ever reported."""
        row = self.memory.setdefault(int(report["rank"]), {"rank": report["rank"], "iteration": self.iteration})
        self.memory_rows = self.rows
        for name, value in report.items():
            row[name] = max(row.get(name, 0.0), value) if name.startswith("max_") else value

    def add_memories(self, columns: Mapping[str, np.ndarray], rank: float, iteration: float) -> None:
        """Update the memory of a rank (NaN: unnamed, counts as 0) by many reports, (rows,), from `iteration` on."""
        known = {name: values[values == values] for name, values in columns.items()}
        report = {n: float(v.max() if n.startswith("max_") else v[-1]) for n, v in known.items() if len(v)}
        reporter = 0.0 if rank != rank else rank
        if report:
            self.memory.setdefault(int(reporter), {"rank": reporter, "iteration": iteration})
            self.add_memory({"rank": reporter, **report})

    def add_ending(self, found: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not continue after, with the
        nodes at fault of all."""
        self.endings = [e for e in self.endings if not superseded(e, self.rows)]
        self.exits = [e for e in self.exits if not superseded(e, self.rows)]
        if found.level == OUTSIDE and found.hosts and "srun: error: " in found.evidence and len(self.exits) < MAX_EXITS:
            self.exits.append(found)
        for place, e in enumerate(self.endings):
            if (e.level, e.status) == (found.level, found.status):
                self.endings[place] = joined(e, found)
                return
        self.endings.append(found)
