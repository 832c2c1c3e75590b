"""PartialRun: one run while its log is being read."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.endings import LAUNCHER, OUTSIDE, SCHEDULER, WRAPPER, Ending, joined, superseded
from trilane.logs.hardware import Device
from trilane.logs.table import NAN, NumericTable

LATE_S = 60.0  # of iterations that may still follow the scheduler's message: SLURM's KillWait is 30 s
ENDED = (SCHEDULER, OUTSIDE, WRAPPER, LAUNCHER)  # levels of endings after which a launch begins another run
MAX_LATE = 1000  # iterations, where they have no times


class PartialRun:
    """What was read of a run so far; `keep` and `spill` as in NumericTable. Tables grow by 8 bytes a number; everything
    else is bounded by the number of ranks and names."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._table = partial(NumericTable, keep, spill)
        self.iterations, self.companion = self._table(), self._table()
        self.timers, self.bandwidth = NumericTable(keep), NumericTable()
        self.validation = NumericTable()
        self.memory: dict[int, dict[str, float]] = {}
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.endings: list[Ending] = []
        self.previous: PartialRun | None = None  # the run that these lines may belong to
        self.rank = NAN  # that prints the iterations, if known
        self.root_rank: int | None = None
        self.first_iteration = 1  # what the program calls its first iteration
        self.places: dict[int, tuple[str, str]] = {}  # of ranks: host, and GPU on it
        self.last_line = b""
        self._last: dict[str, tuple[float, float]] = {}  # by dialect, the last iteration and its time stamp
        self.timed_by_stamps: set[str] = set()  # dialects whose seconds are differences of time stamps

    @property
    def iteration(self) -> float:
        """The number of the last iteration read, 0 before the first."""
        for table in (self.iterations, self.companion):
            if table.rows:
                return table.last("iteration")
        return 0.0

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
        self.last_line = late.last_line
        self.root_rank = self.root_rank if self.root_rank is not None else late.root_rank
        self.memory |= late.memory
        self.places |= late.places
        self.arguments |= late.arguments
        self.summary |= late.summary
        for end in ends:
            self.add_ending(end)

    @property
    def has_content(self) -> bool:
        """Whether it has iterations, a summary, a benchmark or an ending."""
        return self.ends_at_launch or bool(self.endings)

    def timed(self, row: dict[str, float], time_s: float, dialect: str) -> dict[str, float]:
        """The row, with seconds per iteration since the last of that dialect, unless it has its own; `time_s` is NaN
        where the line has no time stamp."""
        last, before = self._last.get(dialect, (row["iteration"], NAN))
        steps, seconds = row["iteration"] - last, time_s - before
        if (steps > 0 and seconds != 0) or dialect not in self._last:  # several steps may share a whole second
            self._last[dialect] = (row["iteration"], time_s)
        if "sec_per_it" in row or not (steps > 0 and seconds > 0):
            return row
        self.timed_by_stamps.add(dialect)
        return row | {"sec_per_it": seconds / steps}

    def accepts(self, row: Mapping[str, float], rank: float) -> bool | None:
        """Whether the row is the next of this run; None if it was read before, as several ranks may print the same."""
        last = self.iterations.last("iteration")
        if not self.iterations.rows or row["iteration"] > last:
            return True
        if rank == rank and self.rank == self.rank and rank != self.rank:
            return None
        same = row["iteration"] == last
        known = [n for n in ("lm_loss", "sec_per_it", "consumed_samples", "epoch") if n in row and n in self.iterations]
        if same and all(row[n] == self.iterations.last(n) or row[n] != row[n] for n in known):
            return None
        return False

    def forget(self) -> None:
        """Drop the iterations read so far, which were not what they looked like."""
        self.iterations = self._table()
        self.dialects.clear()

    def repeats(self, row: Mapping[str, float], dialect: str) -> bool:
        """Whether the dialect, alone in the run, printed this iteration last, as a bar that is drawn again."""
        return self.iterations.last("iteration") == row["iteration"] and set(self.dialects) == {dialect}

    def add(self, row: dict[str, float], dialect: str, rank: float, line: bytes) -> None:
        """Append an iteration."""
        self.iterations.add(row)
        self._count(dialect, 1, rank, line)

    def extend(self, names: Sequence[str], values: np.ndarray, dialect: str, rank: float, line: bytes) -> None:
        """Append iterations of one dialect, (names, rows); `line` is the last one."""
        self.iterations.extend(names, values)
        self._count(dialect, values.shape[1], rank, line)

    def _count(self, dialect: str, rows: int, rank: float, line: bytes) -> None:
        self.dialects[dialect] += rows
        self.rank = self.rank if self.rank == self.rank else rank
        self.last_line = line

    def complete(self, row: dict[str, float]) -> None:
        """Add what another rank or reporter prints for an iteration already read: only the last stage has a loss."""
        table, place = self.iterations, self.iterations.find("iteration", row["iteration"])
        if place is not None:
            table.change(
                place, {n: v for n, v in row.items() if n not in table or table.at(n, place) != table.at(n, place)}
            )

    def add_companion(self, row: dict[str, float], line: bytes) -> None:
        """Add DeepSpeed's own numbers, a row for each iteration; used only where no other dialect reports any."""
        self.dialects["deepspeed"] += 0
        if not self.iterations.rows:
            self.last_line = line
        if self.companion.rows and self.companion.last("iteration") == row["iteration"]:
            self.companion.change_last(row)
        else:
            self.companion.add(row)

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
        for name, value in report.items():
            row[name] = max(row.get(name, 0.0), value) if name.startswith("max_") else value

    def add_ending(self, found: Ending) -> None:
        """Add an ending. Of each level and status the first one is kept that the run did not continue after, with the
        nodes at fault of all."""
        self.endings = [e for e in self.endings if not superseded(e, self.rows)]
        for place, e in enumerate(self.endings):
            if (e.level, e.status) == (found.level, found.status):
                self.endings[place] = joined(e, found)
                return
        self.endings.append(found)
