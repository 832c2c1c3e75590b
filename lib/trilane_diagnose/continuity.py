"""Continuity: what the restarts of a training did not continue, by its logs alone, and what the
logs do not show.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import SIGMAS, Restart, change, join, noise
from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog
from trilane.utils.tables import DataFrame, Record, one_line
from trilane.utils.validation import shipped_json

# Quantities and findings in words.
WORDS: Mapping[str, str] = shipped_json("restart_causes")["words"]
# findings that several causes can have
OPEN = ("loss-level", "gradient-scale", "gradient-level", "rate-level", "another-schedule")
LEVELS = ("lm_loss", "grad_norm")
ZERO_IS_A_VALUE = ("learning_rate", "skipped", "consumed_samples")
LEAST, MOST = 1e-18, 1e18  # numbers outside are damaged
ONCE = 4.0  # of robust noise: a restart is one place, where SIGMAS is for ten thousand lines
FEWEST = 12  # lines before a restart by which loss and gradient norm are judged
FEWEST_AFTER = 3
MEDIAN_VARIANCE = math.pi / 2  # of a median, relative to that of a mean
SAME = 0.01  # relative: rounding of printed values
UNSEEN = (
    "seeds, optimizer states, data order (no log shows them: `trilane debug restart` compares "
    "what was saved)"
)


class Found(NamedTuple):
    """A cause, the new line that differs first, the value expected there, a detail."""

    cause: str
    place: int
    expected: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a log: the log's name, the iteration, and the value."""

    log: str
    iteration: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.6g} in iteration {self.iteration} of {self.log}"


@dataclass(frozen=True, kw_only=True)
class Break(Record):
    """What a restart did not continue: the last line before it, the first one after it that
    differs, and why.

    quantity, cause     keys of WORDS: what is seen; a cause where a test separates it (`detail`)
    expected            what the course before leads to at the line `after`
    size                the value relative to that
    excluded, possible  else the causes that other quantities exclude, with why, and the others
    """

    DERIVED: ClassVar = ("size", "sentence")
    quantity: str
    cause: str
    restart: int
    before: Line
    after: Line
    expected: float
    detail: str = ""
    excluded: tuple[str, ...] = ()
    possible: tuple[str, ...] = ()

    @property
    def size(self) -> float | None:
        if abs(self.expected) < LEAST:
            return None
        return self.after.value / self.expected

    @property
    def sentence(self) -> str:
        where = f"restart at iteration {self.restart}: {WORDS[self.quantity]}"
        size = f"{self.expected:.6g} expected, {change(self.after.value, self.expected)}"
        parts = [f"{where}: {self.before}, {self.after} ({size})", WORDS[self.cause]]
        if self.detail:
            parts.append(self.detail)
        if self.excluded:
            parts.append(f"excluded: {', '.join(self.excluded)}")
        if self.possible:
            parts.append(f"possible: {' | '.join(self.possible)}")
        return one_line("; ".join(parts))


@dataclass(frozen=True, kw_only=True)
class Continuity(Record):
    """Restarts: `breaks`, what they did not continue; `unjudged`, what the logs do not show."""

    restarts: int
    breaks: tuple[Break, ...]
    unjudged: tuple[str, ...]

    def summary(self) -> str:
        """A line for each break, and one for what could not be judged."""
        lines = [broken.sentence for broken in self.breaks]
        return "\n".join([*lines, *(f"not judged: {what}" for what in self.unjudged)])


def find_breaks(logs: Sequence[RunLog]) -> Continuity:
    """What the restarts of one training did not continue; its logs in the order in which they ran.

        find_breaks([read_log("part1.log"), read_log("part2.log")]).summary()

    Left out: what changes without a restart (see find_spikes), a schedule that bends right at the
    restart, a loss that is lower unless iterations were repeated, and trainings whose iteration
    numbers begin again.
    """
    restarts: Sequence[Restart] = ()
    if any(log.first_iteration is not None for log in logs):
        restarts = join(logs).restarts
    breaks = []
    unjudged: dict[str, None] = {}
    for restart in map(Boundary, restarts):
        broken = {}
        continued = []
        for name, rule in RULES.items():
            if not restart.has(name):
                continue
            found = rule(restart, restart.column(name))
            if found:
                broken[name] = found
            elif name not in LEVELS or restart.has_course:
                continued.append(name)
        for name, found in broken.items():
            one = restart.broken(name, found)
            breaks.append(_explained(one, continued, restart) if one.cause in OPEN else one)
        unjudged |= dict.fromkeys(_unjudged(restart))
    if restarts:
        unjudged[UNSEEN] = None
    return Continuity(restarts=len(restarts), breaks=tuple(breaks), unjudged=tuple(unjudged))


def _explained(broken: Break, continued: Sequence[str], restart: "Boundary") -> Break:
    """The break with the causes that it excludes together with the quantities that go on as before,
    and the others.
    """
    # the first line alone is off by more than noise: nothing that an optimizer does has changed it
    recent = restart.before(broken.quantity)[-64:]
    size = abs(broken.size or 1.0)
    at_once = restart.every <= 1 and broken.after.iteration == broken.restart
    if math.isfinite(size):
        at_once &= abs(math.log(size)) > ONCE * noise(np.log(np.maximum(recent, 1e-300)))
    excluded = []
    possible = []
    # loss and gradient norm of the first step are computed before an optimizer changes anything
    for cause in shipped_json("restart_causes")["causes"]:
        if broken.quantity not in cause["breaks"]:
            continue
        whole = [WORDS[name] for name in cause["always"] if name in continued]
        if whole:
            excluded.append(f"{cause['cause']} ({whole[0]} goes on)")
        elif at_once and broken.quantity not in cause["at_once"]:
            excluded.append(f"{cause['cause']} (acts after the first step)")
        else:
            possible.append(cause["cause"])
    return replace(broken, excluded=tuple(excluded), possible=tuple(possible))


class Column(NamedTuple):
    """A quantity before and after a restart: iterations and values, where training can have
    them.
    """

    name: str
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
        """A column; nothing where a log does not print it."""
        before = self.restart.before
        after = self.restart.after
        if not all(name in log.iterations for log in self.restart.logs):
            before = before.iloc[:0]
            after = after.iloc[:0]
        return Column(name, *_numbers(before, name), *_numbers(after, name))

    def has(self, name: str) -> bool:
        """Whether both sides print the column."""
        column = self.column(name)
        return len(column.at) > 0 and len(column.at_new) > 0

    @property
    def has_course(self) -> bool:
        """Whether there are lines enough to judge a loss or a gradient norm."""
        lines = int((self.restart.before["iteration"] < self.restart.iteration).sum())
        return lines >= FEWEST and len(self.restart.after) >= FEWEST_AFTER

    def before(self, name: str) -> np.ndarray:
        """The values up to that of the first iteration after the restart, else of the last one
        before it.
        """
        column = self.column(name)
        end = int(np.searchsorted(column.at, self.restart.iteration, "right"))
        return column.values[: max(end, 1)]

    def differs(self, name: str) -> bool:
        """Whether the first value of a column after the restart is another one."""
        if not self.has(name):
            return False
        return abs(self.column(name).new[0] / self.before(name)[-1] - 1) > SAME

    def broken(self, name: str, found: Found) -> Break:
        """The Break of a column, against the last line before the restart."""
        column = self.column(name)
        last = max(int(np.searchsorted(column.at, self.restart.iteration)) - 1, 0)
        old, new = map(_name, self.restart.logs)
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
            detail=found.detail,
        )


def _name(log: RunLog) -> str:
    """Of a log; that of a run folder has the folder's name."""
    if log.source.name == "run.log":
        return str(Path(*log.source.parts[-2:]))
    return log.source.name


def _unjudged(restart: Boundary) -> Iterator[str]:
    iteration = restart.restart.iteration
    where = f"restart at iteration {iteration}"
    missing = [WORDS[name] for name in RULES if not restart.has(name)]
    if missing:
        yield f"{', '.join(missing)} (not printed on both sides of the {where})"
    if not restart.has_course:
        yield f"loss, gradient norm (too few lines at the {where})"
    at = restart.restart.before["iteration"]
    last = at[at < iteration].max()
    if iteration - last > restart.every:
        yield f"iterations {last + 1:.0f} to {iteration - 1} (in no log)"


def _rate(restart: Boundary, column: Column) -> Found | None:
    """The learning rate against the schedule before it, continued by its slope beyond the last
    iteration.
    """
    _, at, values, at_new, new = column
    beyond = np.maximum(at_new - at[-1], 0.0)
    slope = _slope(at[-8:], values[-8:])
    slope_new = _slope(at_new[:8], new[:8])
    expected = np.interp(at_new, at, values) + slope * beyond
    # logs print three digits; at the restart a warm-up, plateau or decay may begin or end
    bend = (abs(slope) + abs(slope_new)) * np.maximum(restart.every, beyond)
    wrong = np.abs(new - expected) > 2 * SAME * expected + bend
    # most of the first three lines; a schedule in samples goes on over the samples
    if 2 * wrong[:3].sum() <= len(wrong[:3]) or restart.differs("global_batch_size"):
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
    return Found(cause, 0, expected, f"{abs(value - expected):.0f} samples")


def _scale(restart: Boundary, column: Column) -> Found | None:
    """The loss scale: it moves by a factor of 2 on its own, down also by one for each skipped
    iteration.
    """
    before = restart.before("loss_scale")
    old = before[-1]
    new = column.new[0]
    skipped = restart.column("skipped").new
    down = min(64.0, skipped[0]) if len(skipped) else 0.0
    step = max(_largest_step(before), _largest_step(column.new))
    if 1 / (4 * 2**down) < new / old < max(4.0, 2 * step):
        return None
    # Megatron begins at 2^32, DeepSpeed at 2^16, where no argument says otherwise
    given = restart.restart.logs[1].arguments.get("initial_loss_scale")
    cause = "loss-scale-lost"
    if 1.0 in (old, new):
        cause = "precision-changed"
    elif new in (before[0], given, 2.0**16, 2.0**32):
        cause = "loss-scale-initial"
    return Found(cause, 0, old)


def _size(restart: Boundary, column: Column) -> Found | None:
    """Batch size or sequence length: the value before the restart, or the next step of those seen.

    A ramp-up or curriculum grows by about the factor of its steps, which falls or stays.
    """
    before = restart.before(column.name)
    old = before[-1]
    new = column.new[0]
    most = (1 + SAME) * max(_largest_step(before), _largest_step(column.new)) ** 1.5
    planned = restart.restart.logs[1].arguments.get("rampup_batch_size")
    if column.name == "global_batch_size" and planned not in (None, "None"):
        most = math.inf
    if 1 - SAME < new / old < most:
        return None
    grows = bool((np.diff(column.new) > 0).any())
    cause = "batch-changed"
    if column.name == "seq_length":
        cause = "sequence-length"
    elif new < old and (grows or new == before[0]):
        cause = "ramp-up-restarted"
    return Found(cause, 0, old)


def _largest_step(values: np.ndarray) -> float:
    """The largest factor from one value to the next; 1.0 where none rises."""
    return float((values[1:] / values[:-1]).max(initial=1.0))


def _moved(restart: Boundary, column: Column, least: float) -> tuple[float, float]:
    """The expected ln(value), and by how much the lines after the restart lie off it; 0.0 where
    that is noise.

    Where three iterations were repeated, the same data before and after are compared. Else the rise
    of the median of 8 lines over that of the 32 before, against the largest rise that the training
    made on its own: a loss falls by itself, so that only a rise counts. Left out: a rise hidden by
    earlier ones as large.
    """
    at = column.at[column.values > 0]
    old = np.log(column.values[column.values > 0])
    at_new = column.at_new[column.new > 0]
    new = np.log(column.new[column.new > 0])
    _, repeated, originals = np.intersect1d(at_new, at, return_indices=True)
    if len(repeated) >= FEWEST_AFTER:
        off = new[repeated] - old[originals]
        middle = float(np.median(off[:8]))
        error = noise(off) * math.sqrt(MEDIAN_VARIANCE / len(off[:8]))
        is_noise = abs(middle) <= max(least, SIGMAS * error)
        return float(old[originals[0]]), 0.0 if is_noise else middle
    past = pd.Series(old[at < restart.restart.iteration])
    lines = min(8, len(new))
    if len(past) < FEWEST or lines < FEWEST_AFTER:
        return 0.0, 0.0
    level = past.rolling(32, min_periods=FEWEST // 2).median()
    own_rise = float((past.rolling(lines).median() - level.shift(lines)).max())
    rise = float(np.median(new[:lines])) - level.iloc[-1]
    # of both medians
    error = math.sqrt(MEDIAN_VARIANCE / lines + MEDIAN_VARIANCE / min(32, len(past)))
    error *= noise(past.tail(64).to_numpy())
    is_noise = rise <= max(least, 1.5 * own_rise, ONCE * error)
    return float(past.tail(3).median()), 0.0 if is_noise else rise


def _loss(restart: Boundary, column: Column) -> Found | None:
    expected, moved = _moved(restart, column, SAME)
    if not moved:
        return None
    level = math.exp(expected)
    old = column.values
    new = column.new
    size = restart.restart.logs[1].arguments.get("padded_vocab_size")
    untrained = math.log(size) if isinstance(size, int) else 0.0
    if column.at[0] <= 2 * restart.every:
        untrained = float(old[0])
    if level < 0.85 * untrained and new[0] > 0.93 * untrained:
        detail = f"an untrained model's is about {untrained:.4g}"
        return Found("weights-not-loaded", 0, level, detail)
    # only losses that equal those from iteration k on, to the last digit, show k
    for k in reversed(range(len(old) - 2)):
        if len(new) > 2 and (old[k : k + 3] == new[:3]).all():
            return Found("older-checkpoint", 0, level, f"from iteration {column.at[k]:.0f} on")
    return Found("loss-level", _first(new, level, moved), level)


def _gradient(restart: Boundary, column: Column) -> Found | None:
    """The gradient norm; one that changes with the loss, or with the batch size, is no finding of
    its own.
    """
    expected, moved = _moved(restart, column, math.log(2))
    if not moved or restart.differs("global_batch_size"):
        return None
    if restart.has("lm_loss") and _loss(restart, restart.column("lm_loss")):
        return None
    last_half = column.new[len(column.new) // 2 :]
    stays = abs(math.log(np.median(last_half)) - expected) > 0.5 * abs(moved)
    cause = "gradient-scale" if stays else "gradient-level"
    level = math.exp(expected)
    return Found(cause, _first(column.new, level, moved), level)


def _first(values: np.ndarray, level: float, moved: float) -> int:
    """The first line that is half as far off, by the logarithm, as the lines after the restart."""
    return int(np.argmax(np.log(values / level) * np.sign(moved) > 0.5 * abs(moved)))


RULES: Mapping[str, Callable[[Boundary, Column], Found | None]] = {
    "learning_rate": _rate,
    "consumed_samples": _consumed,
    "global_batch_size": _size,
    "loss_scale": _scale,
    "seq_length": _size,
    "lm_loss": _loss,
    "grad_norm": _gradient,
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
