"""Continuity: what the restarts of a training did not continue, by its logs alone, and what the
logs do not show.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

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
Numbers = tuple[np.ndarray, np.ndarray]  # iterations and values
Found = tuple[
    str, int, float, str
]  # the cause, the new line that differs first, the value expected there, a detail
LEVELS = ("lm_loss", "grad_norm")
ONCE = 4.0  # of robust noise: a restart is one place, where SIGMAS is for ten thousand lines
FEWEST = 12  # lines before a restart by which loss and gradient norm are judged


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

    quantity, cause     keys of WORDS: what is seen; a cause where a test separates it, to which `detail` adds
    expected            what the course before leads to at the line `after`; `size` is the value relative to it
    excluded, possible  else the causes that the other quantities exclude, with why, and all that remain
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
        return self.after.value / self.expected if abs(self.expected) > 1e-30 else None

    @property
    def sentence(self) -> str:
        size = f"{self.expected:.6g} expected, {change(self.after.value, self.expected)}"
        where = f"restart at iteration {self.restart}: {WORDS[self.quantity]}"
        seen = f"{where}: {self.before}, {self.after} ({size}); {WORDS[self.cause]}"
        parts = [
            seen,
            self.detail,
            *[f"excluded: {', '.join(self.excluded)}"] * bool(self.excluded),
        ]
        parts += [f"possible: {' | '.join(self.possible)}"] * bool(self.possible)
        return one_line("; ".join(filter(None, parts)))


@dataclass(frozen=True, kw_only=True)
class Continuity(Record):
    """Restarts: `breaks`, what they did not continue; `unjudged`, what the logs do not show."""

    restarts: int
    breaks: tuple[Break, ...]
    unjudged: tuple[str, ...]

    def lines(self) -> list[str]:
        """A line for each break, and one for what could not be judged."""
        return [b.sentence for b in self.breaks] + [f"not judged: {what}" for what in self.unjudged]


def find_breaks(logs: Sequence[RunLog]) -> Continuity:
    """What the restarts of one training did not continue; its logs in the order in which they ran.

        find_breaks([read_log("part1.log"), read_log("part2.log")]).lines()

    Left out: what changes without a restart (see find_spikes), a schedule that bends right at the
    restart, a loss that is lower unless iterations were repeated, and trainings whose iteration
    numbers begin again.
    """
    found, unjudged = list[Break](), dict[str, None]()
    restarts = join(logs).restarts if any(log.first_iteration is not None for log in logs) else ()
    for restart in map(Boundary, restarts):
        judged = {name: rule(restart, name) for name, rule in RULES.items() if restart.has(name)}
        whole = [
            name
            for name, broken in judged.items()
            if not broken and (name not in LEVELS or restart.has_course)
        ]
        mine = [restart.found(name, *broken) for name, broken in judged.items() if broken]
        found += [_explained(one, whole, restart) if one.cause in OPEN else one for one in mine]
        unjudged |= dict.fromkeys(_unjudged(restart))
    unseen = "seeds, optimizer states, data order (no log shows them: `trilane debug restart` compares what was saved)"
    unjudged |= dict.fromkeys([unseen] * bool(restarts))
    return Continuity(restarts=len(restarts), breaks=tuple(found), unjudged=tuple(unjudged))


def _explained(found: Break, whole: Sequence[str], r: "Boundary") -> Break:
    """The break with the causes that it excludes together with the quantities that go on as before,
    and the others.
    """
    # the first line alone is off by more than noise: nothing that an optimizer does has changed it
    sigma = noise(np.log(np.maximum(r.before(found.quantity)[-64:], 1e-300)))
    sudden = (
        abs(math.log(found.size or 1.0)) > ONCE * sigma
        if math.isfinite(found.size or 1.0)
        else True
    )
    at_once = r.every <= 1 and found.after.iteration == found.restart and sudden
    excluded, possible = list[str](), list[str]()
    # loss and gradient norm of the first step (`at_once`) are computed before an optimizer changes
    # anything
    causes: Sequence[Mapping[str, Any]] = shipped_json("restart_causes")["causes"]
    for cause in (cause for cause in causes if found.quantity in cause["breaks"]):
        kept = [WORDS[name] for name in cause["always"] if name in whole]
        late = "acts after the first step" * (at_once and found.quantity not in cause["at_once"])
        why = f"{kept[0]} goes on" if kept else late
        (excluded if why else possible).append(
            f"{cause['cause']} ({why})" if why else cause["cause"]
        )
    return replace(found, excluded=tuple(excluded), possible=tuple(possible))


@dataclass(frozen=True)
class Boundary:
    """A restart as the rules see it: columns before and after it, where training can have their
    values.
    """

    restart: Restart

    @property
    def every(self) -> float:
        """Iterations that a line covers, on the side where it covers more."""
        sides = (self.restart.before, self.restart.after)
        return max(interval(side["iteration"].to_numpy(float)) for side in sides)

    def numbers(self, name: str) -> tuple[Numbers, Numbers]:
        """Iterations and values of a column before the restart and after it; nothing where a log
        does not print it.
        """
        before, after = self.restart.before, self.restart.after
        printed = all(name in log.iterations for log in self.restart.logs)
        one, two = (_numbers(side if printed else side.iloc[:0], name) for side in (before, after))
        return one, two

    def has(self, name: str) -> bool:
        """Whether both sides print the column."""
        return all(len(at) for at, _ in self.numbers(name))

    @property
    def has_course(self) -> bool:
        """Whether there are lines enough to judge a loss or a gradient norm."""
        at = self.restart.before["iteration"]
        return int((at < self.restart.iteration).sum()) >= FEWEST and len(self.restart.after) >= 3

    def before(self, name: str) -> np.ndarray:
        """The values up to that of the first iteration after the restart, else of the last one
        before it.
        """
        (at, x), _ = self.numbers(name)
        return x[: max(int(np.searchsorted(at, self.restart.iteration, "right")), 1)]

    def differs(self, *names: str) -> bool:
        """Whether the first value of a column after the restart is another one, by more than a per
        cent.
        """
        return any(
            abs(self.numbers(n)[1][1][0] / self.before(n)[-1] - 1) > 0.01
            for n in names
            if self.has(n)
        )

    def found(self, name: str, cause: str, place: int, expected: float, detail: str) -> Break:
        """The Break at line `place` of the new values of a column, against the last line before the
        restart.
        """
        (at, x), (at_new, y) = self.numbers(name)
        last = max(int(np.searchsorted(at, self.restart.iteration)) - 1, 0)
        # the log of a run folder has the folder's name
        one, two = (
            Path(*log.source.parts[-2:] if log.source.name == "run.log" else [log.source.name])
            for log in self.restart.logs
        )
        before = Line(log=str(one), iteration=int(at[last]), value=float(x[last]))
        after = Line(log=str(two), iteration=int(at_new[place]), value=float(y[place]))
        made: Any = {
            "before": before,
            "after": after,
            "expected": float(expected),
            "detail": detail,
        }
        return Break(quantity=name, cause=cause, restart=self.restart.iteration, **made)


def _unjudged(r: Boundary) -> Iterator[str]:
    missing = [WORDS[name] for name in RULES if not r.has(name)]
    at, where = r.restart.before["iteration"], f"restart at iteration {r.restart.iteration}"
    before = at[at < r.restart.iteration]
    if missing:
        yield f"{', '.join(missing)} (not printed on both sides of the {where})"
    if not r.has_course:
        yield f"loss, gradient norm (too few lines at the {where})"
    if len(before) and r.restart.iteration - before.iloc[-1] > r.every:
        yield f"iterations {before.iloc[-1] + 1:.0f} to {r.restart.iteration - 1} (in no log)"


def _rate(r: Boundary, name: str) -> Found | None:
    """The learning rate against the schedule before it, continued by its slope beyond the last
    iteration.
    """
    (at, x), (at_new, y) = r.numbers(name)
    slope, own, beyond = (
        _slope(at[-8:], x[-8:]),
        _slope(at_new[:8], y[:8]),
        np.maximum(at_new - at[-1], 0.0),
    )
    expected = np.interp(at_new, at, x) + slope * beyond
    # logs print three digits; at the restart a warm-up, plateau or decay may begin or end
    allowed = 0.02 * expected + (abs(slope) + abs(own)) * np.maximum(r.every, beyond)
    wrong = np.abs(y - expected) > allowed
    # a schedule in samples goes on over the samples
    if 2 * wrong[:3].sum() <= len(wrong[:3]) or r.differs("global_batch_size"):
        return None
    place = int(np.argmax(wrong))
    value, goal = y[place], expected[place]
    is_first = at[0] <= 2 * r.every and abs(value - x[0]) < 0.1 * abs(goal - x[0])
    longer = r.differs("train_iters")  # the number of all iterations, which many logs print
    begins = value < 0.05 * goal or is_first
    return (
        "scheduler-restarted" if begins else "another-schedule" if longer else "rate-level",
        place,
        goal,
        "",
    )


def _consumed(r: Boundary, name: str) -> Found | None:
    """Consumed samples against the count before, plus the batches since."""
    (at, x), (at_new, y) = r.numbers(name)
    done, value = at < at_new[0], float(y[0])
    sides = (at[done][-32:], x[done][-32:]), (at_new[:32], y[:32])
    each = [slope for side in sides if (slope := _slope(*side)) > 0]
    if not each or not done.any():
        return None
    counts = [x[done][-1] + slope * (at_new[0] - at[done][-1]) for slope in each]
    # counts printed as 52.4M rise unevenly by their last digit, and those of a ramp-up do too
    uneven = max(
        float(np.abs(np.diff(v) - np.median(np.diff(v))).max()) for _, v in sides if len(v) > 1
    )
    slack = 0.5 * max(each) + 2 * uneven
    if min(counts) - slack < value < max(counts) + slack:
        return None
    expected = min(counts) if value < min(counts) else max(counts)
    from_start = value <= 1.5 * min(r.every, at_new[0]) * each[-1]
    cause = (
        "data-from-start" if from_start else "data-replayed" if value < expected else "data-skipped"
    )
    return cause, 0, expected, f"{abs(value - expected):.0f} samples"


def _kept(r: Boundary, name: str) -> Found | None:
    """Batch size, sequence length or loss scale: the value before the restart, or the next step of
    those seen.

    A ramp-up or curriculum grows by about the factor of its steps, which falls or stays. A loss
    scale moves by a factor of 2 on its own, down also by one for each skipped iteration.
    """
    x, (_, y), (_, skipped) = r.before(name), r.numbers(name)[1], r.numbers("skipped")[1]
    before, after, given = x[-1], y[0], r.restart.logs[1].arguments
    step = max(float((side[1:] / side[:-1]).max(initial=1.0)) for side in (x, y))
    if name == "loss_scale":
        low, high = (
            1 / (4 * 2 ** (min(64.0, skipped[0]) if len(skipped) else 0)),
            max(4.0, 2 * step),
        )
        # Megatron begins at 2^32, DeepSpeed at 2^16, where no argument says otherwise
        is_initial = after in (x[0], given.get("initial_loss_scale"), 2.0**16, 2.0**32)
        cause = "loss-scale-initial" if is_initial else "loss-scale-lost"
        cause = "precision-changed" if 1.0 in (before, after) else cause
    else:
        planned = name == "global_batch_size" and given.get("rampup_batch_size") not in (
            None,
            "None",
        )
        low, high = 0.99, math.inf if planned else 1.01 * step**1.5
        again = after < before and (np.diff(y).max(initial=0.0) > 0 or after == x[0])
        cause = (
            "sequence-length"
            if name == "seq_length"
            else "ramp-up-restarted"
            if again
            else "batch-changed"
        )
    return None if low < after / before < high else (cause, 0, before, "")


def _moved(r: Boundary, name: str, least: float) -> tuple[float, float]:
    """The expected ln(value), and by how much the lines after the restart lie off it; 0.0 where
    that is noise.

    Where three iterations were repeated, the same data before and after are compared. Else the rise
    of the median of 8 lines over that of the 32 before, against the largest rise that the training
    made on its own: a loss falls by itself, so that only a rise counts. Left out: a rise hidden by
    earlier ones as large.
    """
    (at, x), (at_new, y) = ((when[v > 0], np.log(v[v > 0])) for when, v in r.numbers(name))
    _, mine, theirs = np.intersect1d(at_new, at, return_indices=True)
    if len(mine) >= 3:
        off = y[mine] - x[theirs]
        middle, error = (
            float(np.median(off[:8])),
            noise(off) * math.sqrt(1.57 / len(off[:8])),
        )  # of a median: pi / 2
        return float(x[theirs[0]]), middle if abs(middle) > max(least, SIGMAS * error) else 0.0
    past = pd.Series(x[at < r.restart.iteration])
    lines = min(8, len(y))
    if len(past) < FEWEST or lines < 3:
        return 0.0, 0.0
    level = past.rolling(32, min_periods=FEWEST // 2).median()
    own = float((past.rolling(lines).median() - level.shift(lines)).max())
    rise = float(np.median(y[:lines])) - level.iloc[-1]
    error = noise(past.tail(64).to_numpy()) * math.sqrt(
        1.57 / lines + 1.57 / min(32, len(past))
    )  # of both medians
    return float(past.tail(3).median()), rise if rise > max(least, 1.5 * own, ONCE * error) else 0.0


def _loss(r: Boundary, name: str) -> Found | None:
    (at, x), (_, y) = r.numbers(name)
    expected, moved = _moved(r, name, 0.01)
    if not moved:
        return None
    level, size = math.exp(expected), r.restart.logs[1].arguments.get("padded_vocab_size")
    untrained = (
        float(x[0]) if at[0] <= 2 * r.every else math.log(size) if isinstance(size, int) else 0.0
    )
    if level < 0.85 * untrained and y[0] > 0.93 * untrained:
        return "weights-not-loaded", 0, level, f"an untrained model's is about {untrained:.4g}"
    # only losses that equal those from iteration k on, to the last digit, show k
    again = [at[i] for i in range(len(x) - 2) if len(y) > 2 and (x[i : i + 3] == y[:3]).all()]
    if again:
        return "older-checkpoint", 0, level, f"from iteration {again[-1]:.0f} on"
    return "loss-level", _first(y, level, moved), level, ""


def _gradient(r: Boundary, name: str) -> Found | None:
    """The gradient norm; one that changes with the loss, or with the batch size, is no finding of
    its own.
    """
    (_, y), (expected, moved) = r.numbers(name)[1], _moved(r, name, math.log(2))
    if not moved or r.differs("global_batch_size") or (r.has("lm_loss") and _loss(r, "lm_loss")):
        return None
    stays = abs(math.log(np.median(y[len(y) // 2 :])) - expected) > 0.5 * abs(moved)
    level = math.exp(expected)
    return "gradient-scale" if stays else "gradient-level", _first(y, level, moved), level, ""


def _first(values: np.ndarray, level: float, moved: float) -> int:
    """The first line that is half as far off as the lines after the restart are, by the logarithm."""
    return int(np.argmax(np.log(values / level) * np.sign(moved) > 0.5 * abs(moved)))


RULES: Mapping[str, Callable[[Boundary, str], Found | None]] = {
    **{"learning_rate": _rate, "consumed_samples": _consumed},
    **dict.fromkeys(("global_batch_size", "loss_scale", "seq_length"), _kept),
    **{"lm_loss": _loss, "grad_norm": _gradient},
}


def _slope(at: np.ndarray, values: np.ndarray) -> float:
    """The slope from the first to the last value; 0.0 for one alone."""
    return float((values[-1] - values[0]) / (at[-1] - at[0])) if len(at) > 1 else 0.0


def _numbers(table: DataFrame, name: str) -> Numbers:
    values = table[name].to_numpy(float) if name in table else np.full(len(table), math.nan)
    may_be_zero = name in ("learning_rate", "skipped") or name.startswith("consumed")
    good = (values < 1e18) & (
        (values > 1e-18) | (may_be_zero & (values == 0))
    )  # others are damaged; False for NaN
    return table["iteration"].to_numpy(float)[good], values[good]
