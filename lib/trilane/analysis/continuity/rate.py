"""Rules for the learning rate across a restart: whether its schedule continues, and if not, which one it follows."""

from collections.abc import Iterator

import numpy as np

from trilane.analysis.continuity.causes import Break
from trilane.analysis.continuity.sides import LARGEST, TAIL, Sides, resolution, slope_of

NEAR = 8  # rows on each side that give the slope of a schedule
CLOSE = 5e-4  # relative: learning rates that differ by less are equal
LARGEST_STEP = 0.05  # of a value: the most that rounding of a printed rate may change it
LOWEST = 0.05  # of the expected rate: a warm-up that begins
SCHEDULE = (
    *("train_iters", "train_samples", "max_steps", "num_train_epochs", "lr_decay_iters", "lr_decay_samples"),
    *("lr_decay_style", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr", "min_lr"),
    *("warmup_steps", "lr_scheduler_type", "learning_rate", "lr_wsd_decay_iters"),
)


def learning_rate(sides: Sides, other_batch: bool) -> Iterator[Break]:
    """The learning rate against the schedule before the restart: on repeated iterations row by row, else continued.

    Between the last row before and the first after it, a schedule lies between the lines that both sides' slopes
    draw: so it may begin or end a warm-up, a plateau or a decay there. With another batch size, a schedule in samples
    may also continue over the samples.
    """
    name = "learning_rate"
    if not sides.both(name):
        return
    (at, rate), (at_new, new) = sides.before(name), sides.after(name)
    place, expected = _leaves_schedule(at, rate, at_new, new, sides.old_every)
    if place is None or (other_batch and _same_over_samples(sides)):
        return
    cause, detail = _why_rate(sides, place, expected)
    yield sides.found(name, cause, place, expected, detail)


def _leaves_schedule(
    at: np.ndarray, rate: np.ndarray, at_new: np.ndarray, new: np.ndarray, every: float
) -> tuple[int | None, float]:
    """The first new row that is not on the old schedule, or None, and the rate expected there."""
    printed, digits = resolution(np.concatenate([rate[-TAIL:], new]))
    repeated = np.flatnonzero((at_new >= at[0]) & (at_new <= at[-1]))
    if len(repeated):
        expected = np.interp(at_new[repeated], at, rate)
        steps = np.interp(at_new[repeated], at, np.abs(np.gradient(rate, at)) if len(at) > 1 else np.zeros(1))
        size = np.abs(expected)
        allowed = np.minimum(printed, LARGEST_STEP * size) + (CLOSE + min(digits, LARGEST_STEP)) * size
        wrong = np.abs(new[repeated] - expected) > allowed + 3 * every * steps
        if wrong.sum() * 2 >= len(repeated):
            first = int(np.argmax(wrong))
            return int(repeated[first]), float(expected[first])
        return None, 0.0
    gap = at_new[0] - at[-1]
    slopes = [slope_of(at[-NEAR:], rate[-NEAR:]), slope_of(at_new[:NEAR], new[:NEAR])]
    slopes = [slope for slope in slopes if slope == slope] or [0.0]
    low, high = min([0.0, *slopes]) * gap, max([0.0, *slopes]) * gap
    size = max(abs(rate[-1]), abs(new[0]))
    allowed = min(printed, LARGEST_STEP * size) + (CLOSE + min(digits, LARGEST_STEP)) * size
    allowed += 0.5 * max(map(abs, slopes)) * gap
    moved = new[0] - rate[-1]
    return None if low - allowed <= moved <= high + allowed else 0, float(rate[-1] + slopes[0] * gap)


def _same_over_samples(sides: Sides) -> bool:
    """Whether the rate goes on as a function of the consumed samples, which both sides print."""
    tables = []
    for table in (sides.old, sides.new):
        if not {"consumed_samples", "learning_rate"} <= {*table}:
            return False
        rows = table[["consumed_samples", "learning_rate"]].to_numpy(float)
        rows = rows[((rows >= 0) & (rows < LARGEST)).all(axis=1)]
        rows = rows[np.unique(np.rint(rows[:, 0]), return_index=True)[1]]
        if not len(rows):
            return False
        tables.append(rows)
    old, new = tables
    step = float(np.median(np.diff(old[:, 0]))) if len(old) > 1 else 1.0
    return _leaves_schedule(old[:, 0], old[:, 1], new[:, 0], new[:, 1], step)[0] is None


def _why_rate(sides: Sides, place: int, expected: float) -> tuple[str, str]:
    """The cause of another learning rate, and what supports it."""
    (at, rate), (at_new, new) = sides.before("learning_rate"), sides.after("learning_rate")
    value, slope = new[place], slope_of(at_new[place : place + NEAR], new[place : place + NEAR])
    changed = sides.changed_arguments(SCHEDULE)
    rises = slope > 0 and value + slope * sides.every > value * (1 + 1e-3)
    if (rises and value < 4 * slope * sides.every and value < expected / 2) or value < LOWEST * expected:
        return "scheduler-restarted", changed
    from_start = at[0] <= 2 * sides.old_every
    if from_start and abs(value - rate[0]) < 0.2 * abs(expected - rate[0]):
        return "scheduler-restarted", changed
    if changed:
        return "another-schedule", changed
    both = np.flatnonzero((at_new >= at[0]) & (at_new <= at[-1]) & (new > 0))
    if len(both) >= 3:
        ratios = new[both] / np.maximum(np.interp(at_new[both], at, rate), 1e-30)
        if ratios.max() / ratios.min() < 1.01:
            return "scaled-rate", f"{float(np.median(ratios)):.4g} times the old rate in {len(both)} iterations"
    if value > rate.max() * (1 - 1e-3) and (slope != slope or slope <= 0):
        return "scheduler-restarted", "the rate is the highest of the run again"
    earlier = _at_rate(at, rate, value, slope)
    if earlier is not None:
        return "shifted-schedule", f"that of about iteration {earlier:.0f}"
    before = slope_of(at[-NEAR:], rate[-NEAR:])
    if before and value and slope == slope and abs(slope / before * expected / value - 1) < 0.15:
        return "scaled-rate", f"{value / expected:.4g} times the old rate, falling at the same relative pace"
    return "another-schedule", ""


def _at_rate(at: np.ndarray, rate: np.ndarray, value: float, slope: float) -> float | None:
    """The iteration at which the old schedule had that rate, and fell or rose as fast; None where there is none."""
    if len(at) < 4 or slope != slope or not slope:
        return None
    slopes = np.gradient(rate, at)
    near = np.abs(rate - value) <= 2 * np.abs(slopes) * np.median(np.diff(at)) + 1e-12
    alike = near & (np.abs(slopes - slope) < 0.05 * abs(slope))
    return float(at[np.flatnonzero(alike)[-1]]) if alike.any() else None
