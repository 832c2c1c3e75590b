"""TrainerDicts: the dicts that Hugging Face's Trainer prints, and the numbers of its iterations, often not printed."""

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from trilane.logs.dialects import trainers
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.table import NAN

if TYPE_CHECKING:
    from trilane.logs.reading.lines import Lines

# of a learning rate, which LLaMA-Factory's own reporter prints with five digits:
# https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/callbacks.py
RATE_ROUNDED = 1e-4
MOST_KNOWN = 100  # steps that are compared
EVALUATED = re.compile(rb"\{'eval_\w{1,80}': .{0,4000}'epoch': (\d{1,9}(?:\.\d{1,20})?)\}")
UNNUMBERED = "the log does not number its iterations (no progress bar, no logging_steps, no steps of an epoch)"


class TrainerDicts:
    """Gives the dicts to the run that `lines` are of; one waits as `pending` for the bar on a line after it."""

    def __init__(self, lines: "Lines") -> None:
        self._lines = lines
        self.pending = dict[str, float]()
        self.bar: dict[str, float] = {}  # the last one on a line of its own
        self._line, self._number = b"", 0  # of the pending dict

    def read(self, line: bytes) -> None:
        """Read the dicts of a line. A bar after an evaluation of another epoch is not that of the dict before it."""
        if self.pending and (held_out := EVALUATED.search(line)) and float(held_out[1]) != self.pending.get("epoch"):
            self.release()
        for values in trainers.hf_dicts(line):
            if "train_runtime" in values and "loss" not in values:
                self.release()
                run = self._lines.run
                run.dialects["hf-trainer"] += 0
                run.summary = run.summary or values
                run.last_line = line
            elif self.pending and _is_copy(values, {n: self.pending.get(n, NAN) for n in trainers.HF if n in values}):
                self.pending |= values
            else:
                self.release()
                self.pending, self._line, self._number = values, line, self._lines.number
                if "step" in values:
                    self.release()

    def release(self, line: bytes = b"") -> None:
        """Read the pending dict, with the step of the bar before it, else of the bar on `line`."""
        if values := self.pending:
            self.pending, run = {}, self._lines.run
            after, total = trainers.bar(line), run.iterations.last("train_iters")
            total = after.get("total", NAN) if total != total else total
            if "step" not in values:
                bars = [b for b in (self.bar, after) if b and b["total"] == total and b["step"] > run.iteration]
                values = values | next(iter(bars), {})
            known = {name: column for name, column in trainers.HF.items() if name in values}
            if run.iterations.rows and _is_copy(values, {n: run.iterations.last(name) for n, name in known.items()}):
                return
            row = trainers.hf_iteration(values, next_number(run, values.get("step")))
            row = run.timed(row, values.get("elapsed", NAN), "hf-trainer")
            self._lines.step(row, "hf-trainer", NAN, self._line, self._number)


def _is_copy(values: dict[str, float], before: dict[str, float]) -> bool:
    """Whether a dict is another node's or another reporter's copy of the one before, NaN where that lacks a value.

    Epochs alone are rounded, and equal for many steps.
    """
    rounded = {"learning_rate": RATE_ROUNDED}
    return all(math.isclose(values[n], old, rel_tol=rounded.get(n, 0.0)) for n, old in before.items() if old == old)


def next_number(run: PartialRun, step: float | None) -> float:
    """The number of the Trainer's next iteration: `step` where the log has it, else the last one and
    `logging_steps`, or as far again as from the one before; else it is counted, see settle_numbers."""
    last, rows, every = run.iteration, run.iterations.rows, run.arguments.get("logging_steps")
    if step is not None:
        if rows and (run.counted or run.known) and len(run.known) < MOST_KNOWN:
            run.known.append((rows, step))
        if run.counted and rows:
            if len(run.known) > 1 or step % (rows + 1):  # the first dicts, or some, lack their bar: see settle_numbers
                return last + 1
            _renumber(run, int(step) // (rows + 1), int(step) // (rows + 1))
        run.counted = False
        return step
    resumed = run.arguments.get("resume_from_checkpoint") not in (None, False, "")
    if isinstance(every, int) and every > 0 and (rows or not resumed) and not run.counted:
        return 1.0 if not rows and run.arguments.get("logging_first_step") is True else (last // every + 1) * every
    if rows > 1 and not run.counted:
        return 2 * last - run.iterations.at("iteration", rows - 2)
    run.counted = True
    return last + 1


def settle_numbers(run: PartialRun) -> None:
    """Number iterations that were counted 1, 2, 3, or as far apart as the first step that is known is from 0, by the
    steps that are known, else by their epochs, where these show their steps."""
    by_steps = _equally_far(run.known)
    if run.counted and run.iterations.rows:
        epoch = run.iterations.column("epoch") if "epoch" in run.iterations else np.empty(0)
        _renumber(run, *(by_steps or trainers.logging_steps(run.arguments, epoch)))
    elif len(run.known) > 1:
        rows, step = run.known[0]
        if not by_steps:
            _renumber(run, 0, 0)
        elif (every := by_steps[1]) != (guess := step / (rows + 1)):
            run.iterations.replace(
                "iteration", _first_rows(run, "iteration", rows, step - every * np.arange(rows, 0, -1))
            )
            if "sec_per_it" in run.iterations:
                seconds = run.iterations.column("sec_per_it")[: rows + 1] * guess / every
                run.iterations.replace("sec_per_it", _first_rows(run, "sec_per_it", rows + 1, seconds))


def _first_rows(run: PartialRun, name: str, rows: int, values: np.ndarray) -> np.ndarray:
    """A column with other values in its first rows."""
    return np.concatenate([values, run.iterations.column(name)[rows:]])


def _equally_far(steps: list[tuple[int, float]]) -> tuple[int, int] | None:
    """The first iteration and those from one dict to the next, where the steps that are known, which are its multiples,
    agree on them."""
    if len(steps) < 2:
        return None
    (before, start), (rows, end) = steps[0], steps[-1]
    every = (end - start) / (rows - before)
    fits = every >= 1 and all(step == start + every * (row - before) and step % every == 0 for row, step in steps)
    return (int(start - every * before), int(every)) if fits and start > every * before else None


def _renumber(run: PartialRun, first: int, every: int) -> None:
    """Number counted iterations from `first` on by steps of `every`; 0: their numbers are not known."""
    table = run.iterations
    numbers = first + every * np.arange(table.rows) if every else np.full(table.rows, NAN)
    table.replace("iteration", numbers.astype(float))
    if "sec_per_it" in table:
        table.replace("sec_per_it", table.column("sec_per_it") / (every or NAN))
    if not every:
        run.notes.append(UNNUMBERED)
