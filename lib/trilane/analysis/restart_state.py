"""Rules for what a restart must continue exactly: learning rate, consumed samples, batch size, loss scale, sequence
length.
"""

from collections.abc import Iterator

import numpy as np

from trilane.analysis.restart_sides import TAIL, Break, Sides, resolution

NEAR = 8  # rows on each side that give the slope of a schedule
CLOSE = 5e-4  # relative difference of learning rates that is none
LARGEST_STEP = 0.05  # of a value: a coarser last place of what is printed is not believed
SCALE_JUMP = 4.0  # a loss scale halves or doubles once on its own
LOWEST = 0.05  # of the expected rate: a warm-up that begins
SCHEDULE = (
    *("train_iters", "train_samples", "max_steps", "num_train_epochs", "lr_decay_iters", "lr_decay_samples"),
    *("lr_decay_style", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr", "min_lr"),
    *("warmup_steps", "lr_scheduler_type", "learning_rate", "lr_wsd_decay_iters"),
)
BATCH = (
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "data_parallel_size", "world_size"),
    *("rampup_batch_size", "per_device_train_batch_size", "num_micro_batches"),
)


def exact(sides: Sides) -> Iterator[Break]:
    """The breaks of all quantities that are continued exactly, or not at all."""
    batch = list(_batch(sides))
    yield from _rate(sides, other_batch=bool(batch))
    yield from _consumed(sides)
    yield from batch
    yield from _scale(sides)
    yield from _length(sides)


def _rate(sides: Sides, other_batch: bool) -> Iterator[Break]:
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
    slopes = [_slope(at[-NEAR:], rate[-NEAR:]), _slope(at_new[:NEAR], new[:NEAR])]
    slopes = [slope for slope in slopes if slope == slope] or [0.0]
    low, high = min([0.0, *slopes]) * gap, max([0.0, *slopes]) * gap
    size = max(abs(rate[-1]), abs(new[0]))
    allowed = min(printed, LARGEST_STEP * size) + (CLOSE + min(digits, LARGEST_STEP)) * size
    allowed += 0.5 * max(map(abs, slopes)) * gap
    moved = new[0] - rate[-1]
    return None if low - allowed <= moved <= high + allowed else 0, float(rate[-1] + slopes[0] * gap)


def _slope(at: np.ndarray, values: np.ndarray) -> float:
    return float((values[-1] - values[0]) / (at[-1] - at[0])) if len(at) > 1 else float("nan")


def _same_over_samples(sides: Sides) -> bool:
    """Whether the rate goes on as a function of the consumed samples, which both sides print."""
    tables = []
    for table in (sides.old, sides.new):
        if not {"consumed_samples", "learning_rate"} <= {*table}:
            return False
        rows = table[["consumed_samples", "learning_rate"]].dropna().sort_values("consumed_samples").to_numpy(float)
        if not len(rows):
            return False
        tables.append(rows)
    old, new = tables
    step = float(np.median(np.diff(old[:, 0]))) if len(old) > 1 else 1.0
    return _leaves_schedule(old[:, 0], old[:, 1], new[:, 0], new[:, 1], step)[0] is None


def _why_rate(sides: Sides, place: int, expected: float) -> tuple[str, str]:
    """The cause of another learning rate, and what supports it."""
    (at, rate), (at_new, new) = sides.before("learning_rate"), sides.after("learning_rate")
    value, slope = new[place], _slope(at_new[place : place + NEAR], new[place : place + NEAR])
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
    before = _slope(at[-NEAR:], rate[-NEAR:])
    if before and slope == slope and abs(slope / before * expected / value - 1) < 0.15:
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


def _consumed(sides: Sides) -> Iterator[Break]:
    """Consumed samples (tokens where those are not printed) against the count before, plus the batches since."""
    name = next((n for n in ("consumed_samples", "consumed_tokens") if sides.both(n)), None)
    if name is None:
        return
    (at, counts), (at_new, new) = sides.before(name), sides.after(name)
    done = np.flatnonzero(at < at_new[0])
    batches = [_per_iteration(sides, name, side) for side in (True, False)]
    batches = [batch for batch in batches if batch == batch and batch > 0]
    if not batches:
        return
    if len(done):
        last = int(done[-1])
        low, high = (counts[last] + pick(batches) * (at_new[0] - at[last]) for pick in (min, max))
    elif at_new[0] <= at[-1]:
        low = high = float(np.interp(at_new[0], at, counts))
    else:
        return
    slack, value = 0.5 * max(batches), float(new[0])
    if low - slack < value < high + slack:
        return
    expected = low if value < low else high
    missing, own = value - expected, min(sides.every, at_new[0]) * batches[-1]
    words = "samples" if name == "consumed_samples" else "tokens"
    gap = at_new[0] - at[done[-1]] - sides.every if len(done) else 0
    if gap > 0 and abs(missing + gap * batches[-1]) <= 1.5 * batches[-1]:
        yield _jumped(sides, gap)
    elif value <= 1.5 * own:
        yield sides.found(name, "data-from-start", 0, expected, f"{-missing:.0f} {words}")
    elif missing < 0:
        yield sides.found(name, "data-replayed", 0, expected, f"{-missing:.0f} {words}")
    else:
        since = abs(value - own - counts[-1]) <= slack and at[-1] > at_new[0]
        detail = "; the count went on from where the run had ended, not from the checkpoint" if since else ""
        yield sides.found(name, "data-skipped", 0, expected, f"{missing:.0f} {words}{detail}")


def _jumped(sides: Sides, gap: float) -> Break:
    expected = sides.first - gap
    return sides.found("iteration", "iterations-jump", 0, expected, f"{gap:.0f} iterations without their samples")


def _per_iteration(sides: Sides, name: str, old: bool) -> float:
    """Samples (or tokens) that an iteration consumes just before the restart, or just after it; NaN if unknown."""
    side, place = (sides.before, -1) if old else (sides.after, 0)
    at, batch = side("global_batch_size")
    batch = batch[at < sides.first] if old else batch
    if name == "consumed_samples" and len(batch):
        return float(batch[place])
    at, counts = side(name)
    counts, at = (counts[at < sides.first], at[at < sides.first]) if old else (counts, at)
    pair = slice(-2, None) if old else slice(0, 2)
    return _slope(at[pair], counts[pair])


def _batch(sides: Sides) -> Iterator[Break]:
    """The batch size: that of the same iteration, or of the last one, or the next step of a ramp-up."""
    name = "global_batch_size"
    if (sized := _sizes(sides, name)) is None:
        return
    (values, new), (before, after) = sized
    ramped = sides.new_log.arguments.get("rampup_batch_size") not in (None, "None")
    if after > before and (ramped or _grows(after, before, values, new)):
        return
    again = after < before and (np.diff(new).max(initial=0.0) > 0 or after == values[0])
    detail = sides.changed_arguments(BATCH)
    yield sides.found(name, "ramp-up-restarted" if again else "batch-changed", 0, before, detail)


def _grows(after: float, before: float, *sides: np.ndarray) -> bool:
    """Whether a size grows as it did before the restart, or does after it: by so much, or by such a factor."""
    steps = max(float(np.diff(side).max(initial=0.0)) for side in sides)
    factors = max(float((side[1:] / side[:-1]).max(initial=1.0)) for side in sides)
    return before < after <= max(before + 1.5 * steps, before * 1.01 * factors)


def _length(sides: Sides) -> Iterator[Break]:
    """The sequence length: that of the same iteration, or of the last one, or the next step of a curriculum."""
    name = "seq_length"
    if (sized := _sizes(sides, name)) is None:
        return
    (values, new), (before, after) = sized
    if _grows(after, before, values, new):
        return
    yield sides.found(name, "sequence-length", 0, before, sides.changed_arguments((name,)))


def _sizes(sides: Sides, name: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[float, float]] | None:
    """Values on both sides, the expected one and the first new one; None where they agree or one is not known."""
    if not sides.both(name):
        return None
    (at, values), (at_new, new) = sides.before(name), sides.after(name)
    same = np.flatnonzero(at == at_new[0])
    place = int(same[0]) if len(same) else max(int(np.searchsorted(at, at_new[0])) - 1, 0)
    before, after = float(values[place]), float(new[0])
    return None if abs(after - before) <= 0.01 * before else ((values[: place + 1], new), (before, after))


def _scale(sides: Sides) -> Iterator[Break]:
    """The loss scale, which moves by a factor of 2 on its own, down also by one for each skipped iteration."""
    name = "loss_scale"
    if not sides.both(name):
        return
    (at, values), (_, new) = sides.before(name), sides.after(name)
    last = max(int(np.searchsorted(at, sides.first)) - 1, 0)
    before, after = float(values[last]), float(new[0])
    if min(before, after) <= 0 or before == after:
        return
    if 1.0 in (before, after) and max(before, after) >= 256:
        yield sides.found(name, "precision-changed", 0, before, sides.changed_arguments(("fp16", "bf16", "precision")))
        return
    ratio, skipped = after / before, sides.after("skipped")[1]
    allowed = max(SCALE_JUMP, 2.0 * float((values[1:] / values[:-1]).max(initial=1.0)))
    if 1 / (SCALE_JUMP * 2 ** float(skipped[0] if len(skipped) else 0)) < ratio < allowed:
        return
    first = {float(values[0])} if at[0] <= 2 * sides.old_every else set()
    asked = sides.new_log.arguments.get("initial_loss_scale")
    initial = after in first or after == asked or (ratio > 1 and after in (2.0**16, 2.0**32))
    yield sides.found(name, "loss-scale-initial" if initial else "loss-scale-lost", 0, before)
