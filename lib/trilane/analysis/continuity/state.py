"""Rules for what a restart must continue exactly: learning rate, consumed samples, batch size, loss scale, sequence
length.
"""

from collections.abc import Iterator

import numpy as np

from trilane.analysis.continuity.causes import Break
from trilane.analysis.continuity.rate import learning_rate
from trilane.analysis.continuity.sides import TAIL, Sides, resolution, slope_of

OTHER_WORK = 1.2  # of samples (or tokens) of an iteration, as rate times seconds gives them
NEAR = 8  # rows on each side whose median, or slope, counts
SCALE_JUMP = 4.0  # a loss scale halves or doubles once on its own
BATCH = (
    *("global_batch_size", "micro_batch_size", "gradient_accumulation_steps", "data_parallel_size", "world_size"),
    *("rampup_batch_size", "per_device_train_batch_size", "num_micro_batches"),
)


def exact(sides: Sides) -> Iterator[Break]:
    """The breaks of all quantities that are continued exactly, or not at all."""
    batch = list(_batch(sides))
    yield from learning_rate(sides, other_batch=bool(batch))
    yield from _consumed(sides)
    yield from batch
    yield from _scale(sides)
    yield from _length(sides)


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
    printed = _last_place(np.concatenate([counts[-TAIL:], new]))  # nanotron prints 1.05M
    slack, value = 0.5 * max(batches) + printed, float(new[0])
    if low - slack < value < high + slack:
        return
    expected = low if value < low else high
    missing, own = value - expected, min(sides.every, at_new[0]) * batches[-1]
    words = "samples" if name == "consumed_samples" else "tokens"
    gap = at_new[0] - at[done[-1]] - sides.every if len(done) else 0
    if gap > 0 and abs(missing + gap * batches[-1]) <= 1.5 * batches[-1]:
        yield sides.found(
            "iteration", "iterations-jump", 0, sides.first - gap, f"{gap:.0f} iterations without their samples"
        )
    elif value <= 1.5 * own:
        yield sides.found(name, "data-from-start", 0, expected, f"{-missing:.0f} {words}")
    elif missing < 0:
        yield sides.found(name, "data-replayed", 0, expected, f"{-missing:.0f} {words}")
    else:
        since = abs(value - own - counts[-1]) <= slack and at[-1] > at_new[0]
        detail = "; the count went on from where the run had ended, not from the checkpoint" if since else ""
        yield sides.found(name, "data-skipped", 0, expected, f"{missing:.0f} {words}{detail}")


def _last_place(counts: np.ndarray) -> float:
    """The last place that the largest of these counts shows: of 52.4M it is 100,000."""
    largest = float(np.abs(counts).max())
    return float(resolution(counts)[1] * 10 ** np.floor(np.log10(largest))) if largest else 0.0


def _per_iteration(sides: Sides, name: str, old: bool) -> float:
    """Samples (or tokens) that an iteration consumes just before the restart, or just after it; NaN if unknown."""
    side, place = (sides.before, -1) if old else (sides.after, 0)
    at, batch = side("global_batch_size")
    batch = batch[at < sides.first] if old else batch
    if name == "consumed_samples" and len(batch):
        return float(batch[place])
    at, counts = side(name)
    counts, at = (counts[at < sides.first], at[at < sides.first]) if old else (counts, at)
    lines = 2 if len(counts) > 1 and _last_place(counts[-TAIL:]) < abs(counts[-1] - counts[-2]) else 4 * NEAR
    pair = slice(-lines, None) if old else slice(0, lines)
    return slope_of(at[pair], counts[pair])


def _batch(sides: Sides) -> Iterator[Break]:
    """The batch size: that of the same iteration, or of the last one, or the next step of a ramp-up."""
    name = "global_batch_size"
    if not sides.both(name):
        yield from _work(sides)
    if (sized := _sizes(sides, name)) is None:
        return
    (values, new), (before, after) = sized
    ramped = sides.new_log.arguments.get("rampup_batch_size") not in (None, "None")
    if after > before and (ramped or _grows(after, before, values, new)):
        return
    again = after < before and (np.diff(new).max(initial=0.0) > 0 or after == values[0])
    detail = sides.changed_arguments(BATCH)
    yield sides.found(name, "ramp-up-restarted" if again else "batch-changed", 0, before, detail)


def _work(sides: Sides) -> Iterator[Break]:
    """Samples or tokens of an iteration by rate times seconds, where a log prints no more than these."""
    for name in ("samples_per_second", "tokens_per_second"):
        (at, old), (_, new) = sides.before(name), sides.after(name)
        (timed, seconds), (_, times) = sides.before("sec_per_it"), sides.after("sec_per_it")
        if len(new) != len(times) or not np.array_equal(at, timed) or min(len(old), len(new)) < 3:
            continue
        every, after = (old * seconds)[at < sides.first], (new * times)[:NEAR]
        before = every[-NEAR:]
        if len(before) < 3:
            continue
        usual, now = float(np.median(before)), float(np.median(after))
        calm = max(np.ptp(before) / usual, np.ptp(after) / now) < 0.1 if usual > 0 and now > 0 else False
        grown = now > usual and np.median(every[:NEAR]) * OTHER_WORK < usual  # a ramp-up may go on
        if calm and not grown and not 1 / OTHER_WORK < now / usual < OTHER_WORK:
            detail = f"{name.split('_')[0]} of an iteration, by their rate: {usual:.4g}, now {now:.4g}"
            yield sides.found(name, "batch-changed", 0, float(new[0]) * usual / now, detail)
            return


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
    if 1 / (SCALE_JUMP * 2 ** min(64.0, skipped[0] if len(skipped) else 0.0)) < ratio < allowed:
        return
    first = {float(values[0])} if at[0] <= 2 * sides.old_every else set()
    asked = sides.new_log.arguments.get("initial_loss_scale")
    initial = after in first or after == asked or (ratio > 1 and after in (2.0**16, 2.0**32))
    yield sides.found(name, "loss-scale-initial" if initial else "loss-scale-lost", 0, before)
