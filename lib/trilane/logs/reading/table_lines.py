"""TableLines: the lines of dialects that have a table, given to their runs."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trilane.logs import endings
from trilane.logs.dialects import megatron, trainers
from trilane.logs.dialects.dialect import EPOCHS, MAX_BLOCK, Dialect
from trilane.logs.dialects.megatron import Span
from trilane.logs.dialects.tables import dialects
from trilane.logs.reading.copies import is_late
from trilane.logs.words import Words

if TYPE_CHECKING:
    from trilane.logs.reading.lines import Lines
    from trilane.logs.reading.partial_run import PartialRun

DIGITS = bytes.maketrans(b"123456789", b"000000000")
MEMORY = ("allocated", "max_allocated", "reserved", "max_reserved")
Block = tuple[Dialect, dict[str, float], bytes, int]  # row, first line and its number, of an iteration of several lines


class TableLines:
    """Reads lines by tables; `block` is the iteration that the next lines may continue."""

    def __init__(self, lines: "Lines") -> None:
        self._lines, every = lines, dialects()
        self._dialects = [dialect for dialect in every if not dialect.fallback]
        self._fallbacks = [dialect for dialect in every if dialect.fallback]
        self.guesses = {dialect.name for dialect in self._fallbacks}
        words = {word for dialect in self._dialects for word in dialect.words}
        self._by_word = {word: [d.name for d in self._dialects if word in d.words] for word in sorted(words)}
        self._known_words = Words(self._by_word)
        self.words = tuple(sorted({word for dialect in every for word in dialect.words}))
        # whose digits decide what a line is, every digit as 0
        self._digits = sorted({word.translate(DIGITS) for word in self.words if word.translate(DIGITS) != word})
        self.block: Block | None = None
        self._length = 0
        self._epochs: tuple[PartialRun, float] | None = None  # of a fallback: iterations of the run's earlier epochs

    def best(self, line: bytes) -> tuple[list[Span], Dialect] | None:
        """The numbers of an iteration, and of several dialects that know the line the one that finds most."""
        return _best(self._with_words(line), line)

    def read(self, line: bytes, whole: bool) -> bool:
        """Read a line of a dialect that has a table, of several the one that finds most; False for any other line."""
        known = self._with_words(line)
        return bool(known) and self._by(known, line, whole)

    def _with_words(self, line: bytes) -> list[Dialect]:
        found = {name for word in self._known_words.of(line) for name in self._by_word[word]}
        return [dialect for dialect in self._dialects if dialect.name in found] if found else []

    def _by(self, known: list[Dialect], line: bytes, whole: bool) -> bool:
        if best := _best(known, line):
            spans, dialect = best
            if len(parts := dialect.parts(line)) > 1:
                return any([self._by(known, part, whole or part is not parts[-1]) for part in parts])
            self._lines.finish()
            row = dict[str, float]()
            for span in spans:  # hours, minutes and seconds of one time add up
                if whole or span.stop < len(line):
                    row[span.column] = row.get(span.column, 0.0) + span.value(line)
            if "iteration" in row:
                self.block, self._length = (dialect, row, line, self._lines.number), 0
                if dialect.lines != "block":
                    self.end_block()
            return True
        return any([self._around(line, dialect, whole) for dialect in known])

    def fallback(self, line: bytes, whole: bool) -> bool:
        """Read a line that nothing else reads, in a run that nothing else has read."""
        read = set(self._lines.run.dialects)
        known = [d for d in self._fallbacks if read <= {d.name} and any(word in line for word in d.words)]
        return bool(known) and self._by(known, line, whole)

    def digits_decide(self, line: bytes) -> bool:
        """Whether other digits would make the line one that a table reads."""
        return any(word in line.translate(DIGITS) for word in self._digits)

    def settle(self, dialect: str) -> None:
        """Drop what fallbacks have read of the run, where a line of another dialect shows whose it is."""
        if dialect not in self.guesses and self.guesses & set(self._lines.run.dialects):
            self._lines.run.forget()

    def _around(self, line: bytes, dialect: Dialect, whole: bool) -> bool:
        """Read a line of that dialect that is no iteration."""
        if dialect.is_launch(line):
            self._lines.finish()
            self._lines.launch(line)
        elif dialect.is_end(line):
            self._lines.finish()
            self._lines.run.add_ending(endings.planned_end(line, self._lines.run.rows))
        elif row := dialect.validated(line):
            self._lines.finish()
            self._lines.run.add_validation({"iteration": self._lines.run.iteration} | row)
            self.fallback(line, whole)  # of a trainer that prints nothing else
        else:
            return False
        return True

    def continues(self, line: bytes) -> bool:
        """Whether the line holds further numbers of the iteration that the block began; else the block may end."""
        assert self.block
        dialect, row, first, _ = self.block
        if dialect.begins(line):
            return False
        self._length += 1
        if spans := dialect.rest(line, set(row)):
            row |= {span.column: span.value(line) for span in spans}
        elif self._length > MAX_BLOCK or not (dialect.continues(line, first) or not line.strip()):
            self.end_block()
        return bool(spans)

    def end_block(self) -> None:
        if self.block:
            (dialect, row, line, number), self.block = self.block, None
            self._lines.run.in_epochs |= not EPOCHS.keys().isdisjoint(row)
            row = in_run(self._counted_on(row) if dialect.fallback else row)
            time_s = row.get("time_s", trainers.timestamp(line))
            if dialect.lines in ("bar", "block") and self._lines.run.repeats(row, dialect.name):
                self._draw_again(self._lines.run.timed(seconds(row), time_s, dialect.name), megatron.source(line))
            elif dialect.fallback and self._evaluates(row):
                pass
            elif dialect.fallback and is_late(row, self._lines.run.iterations):
                self._lines.run.copies.compare(row, self._lines.run.iterations)
            else:
                self.step(row, time_s, dialect.name, dialect.first_iteration, line, number)
                if dialect.fallback:
                    self._lines.run.look_for_stray(row)

    def _draw_again(self, row: dict[str, float], rank: float) -> None:
        """Read a bar that is drawn again at the same iteration: with its loss after the loss of the one before, which
        counts; or, where it had its loss, for a part of the batch or by another rank, which is noted."""
        run, table = self._lines.run, self._lines.run.iterations
        if table.rows > 1 and "lm_loss" in table and table.last("lm_loss") != table.at("lm_loss", table.rows - 2):
            run.copies.compare(row, table)
        if rank == run.rank or rank != rank:
            table.change_last(row)

    def _counted_on(self, row: dict[str, float]) -> dict[str, float]:
        """The row of a fallback with the number in the run, where numbers have begun anew with an epoch."""
        run = self._lines.run
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
        run, table = self._lines.run, self._lines.run.iterations
        if not table.rows or ("val_loss" in row) == ("val_loss" in table):
            return False
        held_out = [(row["iteration"], row["val_loss"])] if "val_loss" in row else []
        if not held_out:  # all that was read so far were evaluations
            held_out = [(table.at("iteration", i), table.at("val_loss", i)) for i in range(table.rows)]
            run.forget()
        for iteration, loss in held_out:
            run.add_validation({"iteration": iteration, "lm_loss": loss})
        return "val_loss" in row

    def step(self, row: dict[str, float], time_s: float, name: str, first: int, line: bytes, number: int) -> None:
        """Add an iteration of the dialect of that name; `number` is that of its line in the file."""
        run = self._lines.run
        self._lines.step(run.timed(seconds(row), time_s, name), name, megatron.source(line), line, number)
        self._lines.run.first_iteration = first
        if held := {name: row[name] for name in MEMORY if name in row}:
            rank = megatron.rank(line)
            self._lines.run.add_memory({"rank": 0.0 if rank != rank else rank, **held})


def seconds(row: dict[str, float]) -> dict[str, float]:
    """The row with seconds per iteration instead of their rate."""
    if (rate := row.pop("iterations_per_second", 0.0)) > 0:
        row.setdefault("sec_per_it", 1 / rate)
    return row


def in_run(row: dict[str, float]) -> dict[str, float]:
    """The row with the iteration's number in the run, where it has that in its epoch."""
    for column in EPOCHS.keys() & row:
        done = row["epoch"] = row.pop(column) - EPOCHS[column]
        if "train_iters" in row:
            row["iteration"] += done * row["train_iters"]
            row["train_iters"] *= done + 1  # as far as is known: the number of epochs is not
    return row


def _best(known: Sequence[Dialect], line: bytes) -> tuple[list[Span], Dialect] | None:
    found = [(spans, dialect) for dialect in known if (spans := dialect.iterations(line))]
    return max(found, key=lambda pair: len(pair[0])) if found else None
