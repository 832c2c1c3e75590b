"""Continuity: what the restarts of a training did not continue, by its logs alone, and what the
logs do not show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import SIGMAS, Restart, change, join, noise
from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Record, one_line
from trilane.utils.validation import shipped_json

# Quantities and causes in words.
WORDS = shipped_json("restart_causes")
ZERO_IS_A_VALUE = ("learning_rate", "consumed_samples")
LEAST, MOST = 1e-18, 1e18  # numbers outside are damaged
ONCE = 4.0  # of robust noise: a restart is one place, where SIGMAS is for ten thousand lines
FEWEST = 12  # lines before a restart by which the loss is judged
FEWEST_AFTER = 3
MEDIAN_VARIANCE = math.pi / 2  # of a median, relative to that of a mean
SAME = 0.01  # relative: rounding of printed values
UNSEEN = (
    "seeds, optimizer states, data order (no log shows them: `trilane debug restart` compares "
    "what was saved)"
)


class Found(NamedTuple):
    """A cause, the new line that differs first, the value expected there."""

    cause: str
    place: int
    expected: float


@frozen
class Line:
    """A line of a log: the log's name, the iteration, and the value."""

    log: str
    iteration: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.6g} in iteration {self.iteration} of {self.log}"


@frozen
class Break(Record):
    """What a restart did not continue: the last line before it, the first one after it that
    differs, and why.

    quantity, cause     keys of WORDS: what is seen; a "-level" where several causes may lead to it
    expected            what the course before leads to at the line `after`
    size                the value relative to that
    """

    DERIVED: ClassVar = ("size", "sentence")
    quantity: str
    cause: str
    restart: int
    before: Line
    after: Line
    expected: float

    @property
    def size(self) -> float | None:
        if abs(self.expected) < LEAST:
            return None
        return self.after.value / self.expected

    @property
    def sentence(self) -> str:
        where = f"restart at iteration {self.restart}: {WORDS[self.quantity]}"
        size = f"{self.expected:.6g} expected, {change(self.after.value, self.expected)}"
        return one_line(f"{where}: {self.before}, {self.after} ({size}); {WORDS[self.cause]}")


@frozen
class Continuity:
    """Restarts: `breaks`, what they did not continue; `unjudged`, what the logs do not show."""

    restarts: int
    breaks: tuple[Break, ...]
    unjudged: tuple[str, ...]


def find_breaks(logs: Sequence[RunLog]) -> Continuity:
    """What the restarts of one training did not continue; its logs in the order in which they ran.

        find_breaks([read_log("part1.log"), read_log("part2.log")]).breaks

    Left out: what changes without a restart (see find_spikes), a schedule that bends right at the
    restart, a loss that is lower unless iterations were repeated, gradient norms and loss scales,
    and trainings whose iteration numbers begin again.
    """
    restarts: Sequence[Restart] = ()
    if any(log.first_iteration is not None for log in logs):
        restarts = join(logs).restarts
    breaks = []
    unjudged = []
    for restart in map(Boundary, restarts):
        missing = []
        for name, rule in RULES.items():
            if not restart.shows(name):
                missing.append(WORDS[name])
                continue
            found = rule(restart, restart.column(name))
            if found:
                breaks.append(restart.broken(name, found))
        if missing:
            where = f"the restart at iteration {restart.restart.iteration}"
            unjudged.append(f"{', '.join(missing)} (too few lines on a side of {where})")
    if restarts:
        unjudged.append(UNSEEN)
    return Continuity(restarts=len(restarts), breaks=tuple(breaks), unjudged=tuple(unjudged))


class Column(NamedTuple):
    """A quantity before and after a restart: iterations and values, where training can have
    them.
    """

    at: np.ndarray
    values: np.ndarray
    at_new: np.ndarray
    new: np.ndarray


@dataclass(frozen=True)
class Boundary:
    """A restart as the rules see it."""

    restart: Restart

    @cached_property
    def every(self) -> float:
        """Iterations that a line covers, on the side where it covers more."""
        sides = (self.restart.before, self.restart.after)
        return max(interval(side["iteration"].to_numpy(float)) for side in sides)

    def column(self, name: str) -> Column:
        """A column; nothing on a side that does not print it."""
        return Column(*_numbers(self.restart.before, name), *_numbers(self.restart.after, name))

    def shows(self, name: str) -> bool:
        """Whether both sides have as many lines of the column as its rule needs."""
        column = self.column(name)
        if name == "lm_loss":
            past = int((column.at < self.restart.iteration).sum())
            return past >= FEWEST and len(column.at_new) >= FEWEST_AFTER
        return len(column.at) > 0 and len(column.at_new) > 0

    def differs(self, name: str) -> bool:
        """Whether the first value of a column after the restart is another one."""
        column = self.column(name)
        if not self.shows(name):
            return False
        # that of the same iteration, else of the last one before it
        end = int(np.searchsorted(column.at, self.restart.iteration, "right"))
        return abs(column.new[0] / column.values[max(end, 1) - 1] - 1) > SAME

    @cached_property
    def decays(self) -> bool:
        """Whether a constant rate falls from the restart on, or not yet where it fell before: the
        decay of WSD, begun or put off.

        Its first step is at most as large as the rest of eight lines, as of the square root.
        """
        at, values, at_new, new = self.column("learning_rate")
        stable = values[at < self.restart.iteration][-8:]
        first = new[:8]
        if min(len(stable), len(first)) < FEWEST_AFTER or np.ptp(stable) > 0:
            return False
        fall = first[0] - first[-1]
        is_smooth = 0 <= stable[-1] - first[0] <= fall and np.diff(first).max() <= 0
        return is_smooth and not np.array_equal(np.interp(at_new[:8], at, values), first)

    def broken(self, name: str, found: Found) -> Break:
        """The Break of a column, against the last line before the restart."""
        column = self.column(name)
        last = max(int(np.searchsorted(column.at, self.restart.iteration)) - 1, 0)
        old, new = (log.source.name for log in self.restart.logs)
        place = found.place
        return Break(
            quantity=name,
            cause=found.cause,
            restart=self.restart.iteration,
            before=Line(log=old, iteration=int(column.at[last]), value=float(column.values[last])),
            after=Line(
                log=new, iteration=int(column.at_new[place]), value=float(column.new[place])
            ),
            expected=float(found.expected),
        )


def _rate(restart: Boundary, column: Column) -> Found | None:
    """The learning rate against the schedule before it, continued by its slope beyond the last
    iteration.
    """
    at, values, at_new, new = column
    beyond = np.maximum(at_new - at[-1], 0.0)
    slope = _slope(at[-8:], values[-8:])
    slope_new = _slope(at_new[:8], new[:8])
    expected = np.interp(at_new, at, values) + slope * beyond
    # logs print three digits; at the restart a warm-up, plateau or decay may begin or end
    bend = (abs(slope) + abs(slope_new)) * np.maximum(restart.every, beyond)
    wrong = np.abs(new - expected) > 2 * SAME * expected + bend
    # most of the first three lines; a schedule in samples goes on over the samples
    is_right = 2 * wrong[:3].sum() <= len(wrong[:3]) or restart.decays
    if is_right or restart.differs("global_batch_size"):
        return None
    place = int(np.argmax(wrong))
    value = new[place]
    goal = expected[place]
    first = values[0]
    is_first_rate = at[0] <= 2 * restart.every and abs(value - first) < 0.1 * abs(goal - first)
    cause = "rate-level"
    if value < 0.05 * goal or is_first_rate:
        cause = "scheduler-restarted"
    elif restart.differs("train_iters"):  # the number of all iterations, which many logs print
        cause = "another-schedule"
    return Found(cause, place, goal)


def _consumed(restart: Boundary, column: Column) -> Found | None:
    """Consumed samples against the count before, plus the batches since."""
    first = column.at_new[0]
    done = column.at < first
    old = column.values[done][-32:]
    new = column.new[:32]
    batches = [_slope(column.at[done][-32:], old), _slope(column.at_new[:32], new)]
    batches = [batch for batch in batches if batch > 0]
    if not batches or not len(old):
        return None
    counts = [old[-1] + batch * (first - column.at[done][-1]) for batch in batches]
    # counts printed as 52.4M rise unevenly by their last digit, and those of a ramp-up do too
    uneven = 0.0
    for values in (old, new):
        if len(values) > 1:
            steps = np.diff(values)
            uneven = max(uneven, float(np.abs(steps - np.median(steps)).max()))
    slack = 0.5 * max(batches) + 2 * uneven
    value = float(new[0])
    if min(counts) - slack < value < max(counts) + slack:
        return None
    expected = min(counts) if value < min(counts) else max(counts)
    cause = "data-replayed" if value < expected else "data-skipped"
    if value <= 1.5 * min(restart.every, first) * batches[-1]:
        cause = "data-from-start"
    return Found(cause, 0, expected)


def _batch(restart: Boundary, column: Column) -> Found | None:
    """The batch size: the value before the restart.

    Left out: a ramp-up, which follows the consumed samples.
    """
    grows = np.ptp(column.values) > 0 or np.ptp(column.new) > 0
    grows |= restart.restart.logs[1].arguments.get("rampup_batch_size") not in (None, "None")
    if grows or not restart.differs("global_batch_size"):
        return None
    return Found("batch-changed", 0, column.values[-1])


def _loss(restart: Boundary, column: Column) -> Found | None:
    """The loss against that of the same iterations where they were repeated, else of those before.

    An untrained model's is known where the log before begins with the training.
    """
    expected, moved = _moved(restart, column)
    if not moved:
        return None
    level = math.exp(expected)
    new = column.new
    untrained = column.values[0] if column.at[0] <= 2 * restart.every else 0.0
    if level < 0.85 * untrained and new[0] > 0.93 * untrained:
        return Found("weights-not-loaded", 0, level)
    # the first line that is half as far off, by the logarithm, as the lines after the restart
    place = int(np.argmax(np.log(new / level) * np.sign(moved) > 0.5 * abs(moved)))
    return Found("loss-level", place, level)


def _moved(restart: Boundary, column: Column) -> tuple[float, float]:
    """The expected ln(loss), and by how much the lines after the restart lie off it; 0.0 where that
    is noise.

    Where three iterations were repeated at the same rate, the same data are compared. Else the rise
    of the median of 8 lines over that of the 32 before, against the largest rise that the training
    made on its own: a loss falls by itself, so that only a rise counts. Left out: a rise hidden by
    earlier ones as large.
    """
    old = np.log(column.values)
    new = np.log(column.new)
    _, repeated, originals = np.intersect1d(column.at_new, column.at, return_indices=True)
    if len(repeated) >= FEWEST_AFTER and not restart.decays:
        off = new[repeated] - old[originals]
        middle = float(np.median(off[:8]))
        error = noise(off) * math.sqrt(MEDIAN_VARIANCE / len(off[:8]))
        is_noise = abs(middle) <= max(SAME, SIGMAS * error)
        return float(old[originals[0]]), 0.0 if is_noise else middle
    past = pd.Series(old[column.at < restart.restart.iteration])
    lines = min(8, len(new))
    level = past.rolling(32, min_periods=FEWEST // 2).median()
    own_rise = float((past.rolling(lines).median() - level.shift(lines)).max())
    rise = float(np.median(new[:lines])) - level.iloc[-1]
    # of both medians
    error = math.sqrt(MEDIAN_VARIANCE / lines + MEDIAN_VARIANCE / min(32, len(past)))
    error *= noise(past.tail(64).to_numpy())
    is_noise = rise <= max(SAME, 1.5 * own_rise, ONCE * error)
    return float(past.tail(3).median()), 0.0 if is_noise else rise


RULES = {
    "learning_rate": _rate,
    "consumed_samples": _consumed,
    "global_batch_size": _batch,
    "lm_loss": _loss,
}


def _slope(at: np.ndarray, values: np.ndarray) -> float:
    """The slope from the first to the last value; 0.0 for one alone."""
    if len(at) < 2:
        return 0.0
    return float((values[-1] - values[0]) / (at[-1] - at[0]))


def _numbers(table: DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The iterations and values of a column that training can have."""
    if name not in table:
        return np.empty(0), np.empty(0)
    values = table[name].to_numpy(float)
    good = (values > LEAST) & (values < MOST)  # False for NaN
    if name in ZERO_IS_A_VALUE:
        good |= values == 0
    return table["iteration"].to_numpy(float)[good], values[good]
