"""Rules for what a restart continues within its noise: loss, gradient norm, speed."""

import math
from collections.abc import Iterator

import numpy as np

from trilane.analysis.continuity.causes import Break
from trilane.analysis.continuity.sides import Sides
from trilane.analysis.levels import LEAST_NOISE, TO_SIGMA

LEAST_LINES = 6  # before a restart that give level and noise
TREND = 96  # lines before the restart that give level, trend and noise
RECENT = 0.6  # of the last iteration: lines before that do not count
WINDOWS = (3, 8, 16, 32)  # lines after it whose median is compared
SIGMAS = 5.0  # of the median's standard error
LEAST_RISE = {"lm_loss": 0.01, "grad_norm": math.log(2.0), "sec_per_it": math.log(1.5)}  # of ln(value)
LEAST_DROP = {"lm_loss": 0.05, "grad_norm": math.log(2.5), "sec_per_it": math.inf}
UNTRAINED = 0.93  # of the first loss, or of ln(vocabulary)
VOCABULARIES = (math.log(20_000), math.log(300_000))  # of GPTs, where a log does not print its own
LONG = 0.5  # of the iterations that a run is behind: the shortest half-life of its higher loss
CONVERGED = 0.4  # of the first rise is left at the end of the lines after the restart
TOPOLOGY = (
    *("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "gpus"),
    *("context_parallel_size", "micro_batch_size", "num_gpus", "num_nodes"),
)
Numbers = tuple[np.ndarray, np.ndarray]


def levels(sides: Sides) -> Iterator[Break]:
    """The breaks of loss, gradient norm and speed. A gradient norm that changes with another loss is no finding."""
    losses = list(_loss(sides))
    yield from losses
    if not losses:
        yield from _gradient(sides)
    yield from _speed(sides)


class Course:
    """ln(value) before and after a restart: `rise` and `drop`, how far each line after it is above and below the course
    before.

    On three or more repeated iterations that is the difference from the same iteration, as the data is the same.
    Elsewhere a rise counts from where the trend before ended, a fall from twice that trend continued. The trend is a
    power of the iteration (Kaplan et al. 2020, arXiv:2001.08361), by the last TREND lines, none before RECENT of the
    last.
    """

    def __init__(self, sides: Sides, old: Numbers, new: Numbers) -> None:
        (at, x), (at_new, y) = ((a[v > 0], np.log(v[v > 0])) for a, v in (old, new))
        self.at, self.x, self.at_new, self.y = at, x, at_new, y
        _, mine, theirs = np.intersect1d(at_new, at, return_indices=True)
        self.paired = len(mine) if len(mine) >= WINDOWS[0] else 0
        end = at[-1] if self.paired else sides.first
        past = (at < end + 1) & (at >= RECENT * end) if self.paired else (at < end) & (at >= RECENT * end)
        past_at, past_x = at[past][-TREND:], x[past][-TREND:]
        self.known = len(y) > 0 and (self.paired > 0 or len(past_at) >= LEAST_LINES)
        if not self.known:
            return
        self.rise, self.drop = np.zeros(len(y)), np.zeros(len(y))
        self._against_trend(past_at, past_x)
        if self.paired:
            self.rise[mine] = self.drop[mine] = y[mine] - x[theirs]
            self.expected = float(x[theirs[0]])
            calm = self.rise[mine][len(mine) // 2 :]
            self.sigma, self.lines, self.repeats = _spread(calm - np.median(calm)), math.inf, 1.0

    def _against_trend(self, at: np.ndarray, x: np.ndarray) -> None:
        when, ahead = (np.log(np.maximum(side, 1.0) / max(at[-1], 1.0)) for side in (at, self.at_new))
        slope, level = np.polyfit(when, x, 1) if len(at) >= LEAST_LINES else (0.0, float(np.median(x)))
        self.end, self.slope, self.level, self.smooth = at[-1], slope, level, _smoothed(self.x)
        rest = x - level - slope * when
        self.sigma, self.lines, self.expected = _spread(rest), float(len(rest)), float(level)
        steady = len(rest) < LEAST_LINES or rest.std() == 0
        memory = 0.0 if steady else float(np.clip(np.corrcoef(rest[1:], rest[:-1])[0, 1], 0.0, 0.8))
        self.repeats = (1 + memory) / (1 - memory)  # variance of a mean of noise that remembers
        self.rise, self.drop = self.y - level - max(slope, 0.0) * ahead, self.y - level - 2 * min(slope, 0.0) * ahead

    def course(self, at: np.ndarray) -> np.ndarray:
        """The smoothed ln(value) before the restart at iterations `at`, its trend continued."""
        trend = self.level + self.slope * np.log(np.maximum(at, 1.0) / max(self.end, 1.0))
        return np.where(at <= self.end, np.interp(at, self.at, self.smooth), trend)

    def moved(self, name: str) -> float:
        """By how much ln(value) rose or fell over the windows after the restart; 0.0 where it stayed."""
        found = 0.0
        for lines in (k for k in WINDOWS if k <= (self.paired or len(self.rise))):
            error = max(self.sigma, LEAST_NOISE) * math.sqrt(self.repeats * (1.57 / lines + 4 / self.lines))
            up, down = (float(np.median(side[:lines])) for side in (self.rise, self.drop))
            if up > max(LEAST_RISE[name], SIGMAS * error):
                found = max(found, up)
            elif down < -max(LEAST_DROP[name], SIGMAS * error):
                found = min(found, down)
        return found


def _smoothed(x: np.ndarray) -> np.ndarray:
    width = min(9, max(1, len(x) // 10)) | 1
    return np.convolve(np.pad(x, width // 2, "edge"), np.full(width, 1 / width), "valid")


def _spread(rest: np.ndarray) -> float:
    return max(TO_SIGMA * float(np.median(np.abs(rest))), 0.5 * float(rest.std())) if len(rest) else 0.0


def _loss(sides: Sides) -> Iterator[Break]:
    name = "lm_loss"
    course = Course(sides, sides.before(name), sides.after(name))
    if not course.known or not (moved := course.moved(name)):
        return
    expected = math.exp(course.expected)
    cause, detail = _why_loss(sides, course, moved)
    yield sides.found(name, cause, _place(sides, name), expected, detail)


def _place(sides: Sides, name: str) -> int:
    """The first new value above 0."""
    return int(np.argmax(sides.after(name)[1] > 0))


def _why_loss(sides: Sides, course: Course, moved: float) -> tuple[str, str]:
    """The cause of another loss: untrained weights, older ones, moments that were lost, or something else."""
    if moved < 0:
        return "loss-level", "it is lower: samples that were seen before, or a loss that leaves something out"
    first = math.exp(float(course.y[0]))
    untrained = _untrained(sides, course)
    if untrained and first > UNTRAINED * untrained:
        return "weights-not-loaded", f"an untrained model's is about {untrained:.4g}"
    older, misfit = _lag(course, sides.first)
    half_life, decay = _decay(course)
    rest, behind = course.rise, sides.first - older
    misses = course.y[:5] - course.course(older + course.at_new[:5] - sides.first)
    above = course.y[:64] - course.course(course.at_new[:64])
    constant = float(above.var()) < min(0.8 * misfit, 1.1 * decay)
    if constant and abs(float(above[:3].mean() - above.mean())) < moved / 2:
        return "loss-level", ""
    slow = half_life > LONG * behind and abs(float(misses.mean())) < 0.3 * moved  # what is behind catches up no faster
    if older and (misfit < 0.8 * decay or (slow and misfit < 1.5 * decay)):
        return "older-checkpoint", f"about iteration {older:.0f}"
    end = rest[-max(3, len(rest) // 4) :]
    if len(rest) >= 6 and float(np.median(end)) < CONVERGED * float(np.median(rest[:3])):
        return "moments-lost", ""
    return ("older-checkpoint", f"about iteration {older:.0f}") if older and misfit <= 2 * decay else ("loss-level", "")


def _untrained(sides: Sides, course: Course) -> float:
    """The loss of an untrained model: the training's first, or ln of its vocabulary; 0.0 where the loss before the
    restart is not well below it."""
    level, known = math.exp(course.expected), 0.0
    if course.at[0] <= 2 * sides.old_every:
        known = math.exp(float(course.x[0]))
    sizes = (sides.new_log.arguments.get(name) for name in ("padded_vocab_size", "vocab_size"))
    known = known or next((math.log(size) for size in sizes if isinstance(size, int) and size > 1), 0.0)
    first = math.exp(float(course.y[0]))
    if not known and VOCABULARIES[0] <= first <= VOCABULARIES[1]:
        known = first
    return known if level < 0.85 * known else 0.0


def _lag(course: Course, first: float) -> tuple[float, float]:
    """The earlier iteration whose course the loss after the restart repeats, and the mean square of what differs."""
    y, ahead = course.y[:64], course.at_new[:64] - first
    starts = course.at[course.at < first]
    starts = starts[:: max(1, len(starts) // 500)]
    if len(y) < 3 or len(starts) < LEAST_LINES:
        return 0.0, math.inf
    misfits = [float(np.mean((y - course.course(start + ahead)) ** 2)) for start in starts]
    best = int(np.argmin(misfits))
    if best >= len(starts) - 5 or (best == 0 and float(y[0]) > float(course.smooth[0]) + 0.05):
        return 0.0, math.inf
    return float(starts[best]), misfits[best]


def _decay(course: Course) -> tuple[float, float]:
    """The half-life, in iterations, of a rise that decays exponentially, and the mean square of what it leaves."""
    at = course.at_new[:64]
    rest, found = course.y[:64] - course.course(at), (0.0, math.inf)
    every = float(at[-1] - at[0]) / max(len(at) - 1, 1)
    for lines in (1, 2, 4, 8, 16, 32, 64):
        shape = 0.5 ** (np.arange(len(rest)) / lines)
        size = float(rest @ shape / (shape @ shape))
        found = min(found, (lines * every, float(np.mean((rest - size * shape) ** 2))), key=lambda fit: fit[1])
    return found


def _gradient(sides: Sides) -> Iterator[Break]:
    """The gradient norm; a smaller batch alone makes it larger, by the square root of the ratio."""
    name = "grad_norm"
    course = Course(sides, sides.before(name), sides.after(name))
    if not course.known or not (moved := course.moved(name)):
        return
    old, new = (numbers[1] for numbers in (sides.before("global_batch_size"), sides.after("global_batch_size")))
    if len(old) and len(new) and old[-1] != new[0] and abs(moved) < abs(math.log(old[-1] / new[0])) + LEAST_RISE[name]:
        return
    late = course.rise[8:32]
    stays = len(late) >= 3 and abs(float(np.median(late))) > 0.5 * abs(moved)
    short = len(late) < 3
    cause = "gradient-scale" if stays or short or moved < 0 else "optimizer-state"
    yield sides.found(name, cause, _place(sides, name), math.exp(course.expected))


def _speed(sides: Sides) -> Iterator[Break]:
    """Seconds per iteration, relative to batch and sequence; the first two after a start are slow. Nothing where the
    topology is another one by the arguments."""
    name = "sec_per_it"
    if not sides.both(name) or sides.changed_arguments(TOPOLOGY):
        return
    (at, old), (_, new) = sides.before(name), sides.after(name)
    work, start = _work(sides), 2
    old, new = np.log(old[at < sides.first][-TREND:]), np.log(new[start : start + TREND] / work)
    if len(old) < LEAST_LINES or len(new) < WINDOWS[1]:
        return
    # other load of a machine slows one half only
    slower = float(min(np.median(half) for half in np.array_split(new, 2)) - np.median(old))
    noise = max(_spread(old[2:] - np.median(old)), _spread(new - np.median(new)))
    if slower > max(LEAST_RISE[name], 3 * noise) and np.quantile(new, 0.2) > np.quantile(old, 0.9):
        yield sides.found(name, "slower", start, math.exp(float(np.median(old))) * work)


def _work(sides: Sides) -> float:
    """How many times as many tokens an iteration has after the restart; 1.0 where it has fewer."""
    ratio = 1.0
    for name in ("global_batch_size", "seq_length"):
        if sides.both(name):
            (at, old), (_, new) = sides.before(name), sides.after(name)
            old = old[at < sides.first]
            ratio *= float(np.median(new[:TREND])) / float(np.median(old[-TREND:])) if len(old) else 1.0
    return max(ratio, 1.0)
