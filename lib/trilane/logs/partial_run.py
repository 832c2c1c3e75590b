"""Draft: one run while its log is being read."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.devices import Device
from trilane.logs.endings import Ending, overtaken
from trilane.logs.table import NAN, Table

LATE_S = 60.0  # seconds of iterations after the scheduler's last word that may be this run's: SLURM's KillWait is 30
MOST_LATE = 1000  # iterations, where they say no seconds


class PartialRun:
    """What was read of a run so far; with `keep` and `spill` as in Table.

    Tables grow by 8 bytes a number; all else is bounded by ranks and names.
    """

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self.iterations, self.companion = Table(keep, spill), Table(keep, spill)
        self.timers, self.bandwidth = Table(keep), Table()
        self.memory: dict[int, dict[str, float]] = {}
        self.arguments: dict[str, Value] = {}
        self.summary: dict[str, float] = {}
        self.devices: dict[int, Device] = {}
        self.dialects: Counter[str] = Counter()
        self.endings: list[Ending] = []
        self.follows: PartialRun | None = None  # whose last lines these may be
        self.rank = NAN  # who prints the iterations, where lines say it
        self.root_rank: int | None = None
        self.last_line = b""
        self._clocks: dict[
            str, tuple[float, float]
        ] = {}  # by dialect the last iteration, and when its line was written
        self.clocked: set[str] = set()  # dialects whose seconds are differences of such times

    @property
    def now(self) -> float:
        """The last iteration read, 0 before the first."""
        for table in (self.iterations, self.companion):
            if table.rows:
                return table.last("iteration")
        return 0.0

    @property
    def rows(self) -> int:
        """Iterations read so far."""
        return max(self.iterations.rows, self.companion.rows)

    @property
    def is_over(self) -> bool:
        """Whether a launch that is seen now must be another run's."""
        return bool(self.rows or self.summary or self.bandwidth.rows) or any(e.level in (0, 3, 5) for e in self.endings)

    @property
    def is_ended(self) -> bool:
        """Whether the scheduler ended it, after iterations: what goes on is another run, or output that came late."""
        return bool(self.iterations.rows) and any(e.level == 0 for e in self.endings)

    @property
    def is_late(self) -> bool:
        """Whether its iterations are so few that they may be the end of the run before, which SLURM was killing."""
        rows, known = self.iterations.rows, "sec_per_it" in self.iterations
        return rows <= MOST_LATE and not (known and np.nansum(self.iterations.column("sec_per_it")) > LATE_S)

    def take_back(self, late: "PartialRun") -> None:
        """Append what another draft read, which was this run's."""
        ends = [replace(e, rows=e.rows + self.rows) for e in late.endings]
        for mine, theirs in ((self.iterations, late.iterations), (self.timers, late.timers)):
            mine.append(theirs)
        self.dialects += late.dialects
        self.last_line, self.root_rank = (
            late.last_line,
            self.root_rank if self.root_rank is not None else late.root_rank,
        )
        self.memory |= late.memory
        self.arguments |= late.arguments
        self.summary |= late.summary
        for end in ends:
            self.add_ending(end)

    @property
    def says_something(self) -> bool:
        """Whether anything is known that makes it a run."""
        return self.is_over or bool(self.endings)

    def timed(self, row: dict[str, float], clock: float, who: str) -> dict[str, float]:
        """The row, with the seconds per iteration that passed since the last one of `who`, unless it says them itself.

        `clock` are the seconds at which the line was written, NaN where it does not tell.
        """
        last, before = self._clocks.get(who, (row["iteration"], NAN))
        steps, seconds = row["iteration"] - last, clock - before
        if steps > 0 or who not in self._clocks:
            self._clocks[who] = (row["iteration"], clock)
        if "sec_per_it" in row or not (steps > 0 and seconds > 0):
            return row
        self.clocked.add(who)
        return row | {"sec_per_it": seconds / steps}

    def accepts(self, row: Mapping[str, float], rank: float) -> bool | None:
        """Whether the row is the run's next one; None for what was read before, as other ranks may print the same."""
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

    def add(self, row: dict[str, float], dialect: str, rank: float, line: bytes) -> None:
        """The run's next iteration."""
        self.iterations.add(row)
        self._read(dialect, 1, rank, line)

    def extend(self, names: Sequence[str], values: np.ndarray, dialect: str, rank: float, line: bytes) -> None:
        """The run's next iterations, (names, rows), of one dialect; `line` is the last one."""
        self.iterations.extend(names, values)
        self._read(dialect, values.shape[1], rank, line)

    def _read(self, dialect: str, rows: int, rank: float, line: bytes) -> None:
        self.dialects[dialect] += rows
        self.rank = self.rank if self.rank == self.rank else rank
        self.last_line = line

    def complete(self, row: dict[str, float]) -> None:
        """What another rank adds to an iteration that was read: the loss, which only the last stage knows."""
        place = self.iterations.find("iteration", row["iteration"])
        if place is not None and "lm_loss" in row:
            self.iterations.change(place, {"lm_loss": row["lm_loss"]})

    def add_companion(self, row: dict[str, float], line: bytes) -> None:
        """DeepSpeed's numbers of an iteration; lines of the same iteration become one row.

        They count only where no other dialect reports the iterations.
        """
        self.dialects["deepspeed"] += 0
        if not self.iterations.rows:
            self.last_line = line
        if self.companion.rows and self.companion.last("iteration") == row["iteration"]:
            self.companion.change_last(row)
        else:
            self.companion.add(row)

    def add_timers(self, names: Sequence[str], at: np.ndarray, values: np.ndarray) -> None:
        """Seconds of timers, (names, rows), printed after the iterations `at`, which rise. The last word counts."""
        if len(at) and self.timers.rows and self.timers.last("iteration") == at[0]:
            self.timers.change_last({n: v for n, v in zip(names, values[:, 0], strict=True) if v == v})
            at, values = at[1:], values[:, 1:]
        if len(at):
            self.timers.extend(["iteration", *names], np.vstack([at, values]))

    def add_memory(self, report: Mapping[str, float]) -> None:
        """A rank's memory: what it holds now, and the most that it ever reported."""
        row = self.memory.setdefault(int(report["rank"]), {"rank": report["rank"], "iteration": self.now})
        for name, value in report.items():
            row[name] = max(row.get(name, 0.0), value) if name.startswith("max_") else value

    def add_ending(self, found: Ending) -> None:
        """A line about the end. Of each level and status one is kept: the first that the run did not go on after."""
        self.endings = [e for e in self.endings if not overtaken(e, self.rows)]
        if not any((e.level, e.status) == (found.level, found.status) for e in self.endings):
            self.endings.append(found)
