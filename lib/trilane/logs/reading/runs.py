"""Runs: whose an iteration is: the next of a run, a copy of another rank's, or the first of another run."""

import math
from collections.abc import Sequence

from trilane.logs import endings
from trilane.logs.dialects.prefixes import NAN, rank
from trilane.logs.dialects.tables import Dialect
from trilane.logs.reading.form import DIGITS
from trilane.logs.reading.partial_run import MEMORY, PartialRun
from trilane.utils.validation import require

MAX_RUNS = 10_000  # of a file
REPORTERS = 0.05  # of a loss that two reporters print, such as a bar, which rounds it or averages it: relative
EPOCHS = {"epochs_done": 0.0, "nth_epoch": 1.0}  # where iterations count in their epoch: the number of the first one


class Runs:
    """The runs of a file, of which the last is the current one; `number` is that of the current line."""

    def __init__(self, every: Sequence[Dialect]) -> None:
        self._guesses = {dialect.name for dialect in every if dialect.fallback}
        self._families = {name: d.family for d in every for name in d.family}
        self.all = [PartialRun()]
        self.number = 0
        self._launches = set[bytes]()  # forms of lines of the current run's launch
        self._epochs: tuple[PartialRun, float] | None = None  # of a fallback: iterations of the run's earlier epochs

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self.all[-1]

    def take(
        self,
        row: dict[str, float],
        dialect: Dialect,
        name: str,
        time_s: float,
        printed: float,
        line: bytes,
        number: int,
        is_plain: bool = False,
    ) -> None:
        """Give an iteration of a dialect, all of whose lines were read, to its run."""
        run = self.run
        if "epochs_done" in row or "nth_epoch" in row:
            run.in_epochs, row = True, _in_run(row)
        if (rate := row.pop("iterations_per_second", 0.0)) > 0:
            row.setdefault("sec_per_it", 1 / rate)
        time_s = row.get("time_s", time_s)
        for column, text in dialect.absent.items():
            if row.get(column) == float(text):
                del row[column]
        if (
            dialect.lines in ("bar", "block")
            and run.dialects.keys() == {dialect.name}
            and run.iteration == row["iteration"]
        ):
            return self._draw_again(run.timed(row, time_s, dialect.name), printed)
        if dialect.fallback:
            if not run.dialects.keys() <= {dialect.name}:
                return None
            row = self._counted_on(row)
            if self._evaluates(row):
                return None
            if _is_late(row, run):
                return run.copies.compare(row, run.iterations)
        name = name or next(iter(run.dialects.keys() & dialect.family), dialect.name)
        self.step(run.timed(row, time_s, name), name, printed, line, number)
        run = self.run
        run.first_iteration = dialect.first_iteration
        alone = run.dialects.keys() <= {name, "deepspeed"} and not run.endings
        counted = dialect.lines in ("bar", "block") or dialect.fallback or run.in_epochs
        run.steady = name if is_plain and alone and not counted else ""
        if held := [column for column in MEMORY if column in row]:
            self.run.add_memory({column: row[column] for column in held}, rank(line))
        return None

    def step(self, row: dict[str, float], dialect: str, printed: float, line: bytes, number: int) -> None:
        """Add an iteration: the next of the run, another rank's copy, or the first of another run."""
        self.settle(dialect)
        run = self.run
        others = run.dialects.keys() - {"deepspeed"}
        takes = run.copies.accepts(row, printed, run)
        counts = {name for name in others if run.dialects[name]}
        family = self._families.get(dialect, frozenset())
        if counts and dialect not in counts and not others <= family:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            takes = None if run.iteration == row["iteration"] else False
        if takes is False:
            self.begin()
            takes = True
        if takes:
            if self.run.iterations.rows and any(e.level == endings.SCHEDULER for e in self.run.endings):
                self.return_delayed()
                before = self.run  # until it is clear whether these lines are its delayed output
                self.all.append(PartialRun(follows=True))
                self.run.previous = before
            return self.run.add(row, dialect, printed, line, number)
        run.copies.compare(row, run.iterations, 1e-6 if dialect in counts else REPORTERS)
        if len(family) == 1:
            run.dialects[dialect] += 0
            run.complete(row)
        return None

    def settle(self, dialect: str) -> None:
        """Drop what fallbacks have read of the run, where a line of another dialect shows whose it is."""
        if dialect not in self._guesses and not self._guesses.isdisjoint(self.run.dialects):
            self.run.forget()

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
            self.return_delayed()
            self.all.append(PartialRun(follows=True))
            self._launches.clear()

    def return_delayed(self) -> None:
        """Return the lines of the last run to the one before it, if they may be its delayed output."""
        if (before := self.run.previous) and self.run.may_be_delayed:
            before.absorb(self.all.pop())

    def _draw_again(self, row: dict[str, float], printed: float) -> None:
        """Read a bar that is drawn again at the same iteration: with its loss after the loss of the one before, which
        counts; or, where it had its loss, for a part of the batch or by another rank, which is noted."""
        run, table = self.run, self.run.iterations
        if table.rows > 1 and "lm_loss" in table and table.last("lm_loss") != table.at("lm_loss", table.rows - 2):
            run.copies.compare(row, table)
        if printed == run.rank or printed != printed:
            table.change_last(row)

    def _counted_on(self, row: dict[str, float]) -> dict[str, float]:
        """The row of a fallback with the number in the run, where numbers have begun anew with an epoch."""
        run = self.run
        before = self._epochs[1] if self._epochs and self._epochs[0] is run else 0.0
        last, epoch, total = run.iteration, run.iterations.last("epoch"), row.get("train_iters", 0.0)
        if total > 0 and row.get("epoch", 0.0) > epoch and row["iteration"] + before <= last:
            before = math.ceil(last / total) * total
            self._epochs, run.in_epochs = (run, before), True
        if before and row.get("epoch", 0.0) >= epoch:
            row["iteration"] += before
            row["train_iters"] = before + total
        return row

    def _evaluates(self, row: dict[str, float]) -> bool:
        """Whether the row of a fallback is an evaluation, which is added: it has a loss of held-out text, and other
        rows have none."""
        run, table = self.run, self.run.iterations
        if not table.rows or ("val_loss" in row) == ("val_loss" in table):
            return False
        held_out = [(row["iteration"], row["val_loss"])] if "val_loss" in row else []
        if not held_out:  # all that was read so far were evaluations
            held_out = list(zip(table.column("iteration").tolist(), table.column("val_loss").tolist(), strict=True))
            run.forget()
        for iteration, loss in held_out:
            run.add_validation({"iteration": iteration, "lm_loss": loss})
        return "val_loss" in row


def _in_run(row: dict[str, float]) -> dict[str, float]:
    """The row with the iteration's number in the run, where it has that in its epoch."""
    for column in EPOCHS.keys() & row:
        done = row["epoch"] = row.pop(column) - EPOCHS[column]
        if "train_iters" in row:
            row["iteration"] += done * row["train_iters"]
            row["train_iters"] *= done + 1  # as far as is known: the number of epochs is not
    return row


def _is_late(row: dict[str, float], run: PartialRun) -> bool:
    """Whether the row is a copy of one of the last iterations: unnamed ranks may all print a loss. A number further
    back is a restart's, or another program's."""
    of_epoch = not row.get("epoch", NAN) > run.iterations.last("epoch")
    return of_epoch and run.iterations.find("iteration", row["iteration"], back=4) is not None
