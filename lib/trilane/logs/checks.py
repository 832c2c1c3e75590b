"""Checks: numbers of a run that cannot be right, with the line that shows it; and units that other numbers correct."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from trilane.logs import endings
from trilane.logs.arguments import Value
from trilane.logs.dialects import candidates
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.reader import find_lines
from trilane.logs.reading.trainer_dicts import UNNUMBERED
from trilane.logs.table import NAN, NumericTable

MOST_NUMBER = 1e15  # of an iteration; a larger one is damaged
AGREE = 1.5  # factor between two rates of one run: one may be a running mean, or leave out what the other counts
# Each number by itself. Seconds: kernels take microseconds, the slowest shipped row of data/measured.csv 870 s. FLOP/s:
# twice the dense 16-bit peak of a B200. 0 and -1 stand for "not measured" (nanoGPT, DeepSpeed).
BOUNDS = {
    "sec_per_it": (2e-4, 3600.0, "seconds an iteration: another unit, or other iterations?"),
    "grad_norm": (0.0, math.inf, "a norm is not negative"),
    "learning_rate": (0.0, 1.0, "a learning rate lies between 0 and 1"),
    "lm_loss": (0.0, math.inf, "a cross entropy is not negative"),
    "mfu": (0.0, 1.0, "no more than the peak can be used; a percentage read as a share?"),
    "flops_per_s_per_gpu": (1e6, 4.5e15, "FLOP/s: no card trains at that rate; another unit?"),
}
# Columns without influence on how long an iteration takes, or what it computes.
HARMLESS = ("lm_loss", "grad_norm", "learning_rate", "mfu", "train_iters")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What cannot be right in a column, or cannot be known: `rule` by its short name, `line` its number in the file
    (None: unknown), `evidence` that line's text."""

    rule: str
    column: str
    message: str
    line: int | None = None
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return f"{self.column}: {self.message}{where}"


Found = tuple[str, str, str, int]  # rule, column, message, and the table's row that shows it (-1: the last)


class Columns:
    """The columns of a run, of NaN where it has none, and its launch arguments."""

    def __init__(self, table: NumericTable, arguments: Mapping[str, Value]) -> None:
        self.table, self._arguments, self._nothing = table, arguments, np.full(table.rows, NAN)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.table.column(name) if name in self.table else self._nothing

    def argument(self, *names: str) -> float:
        """The first argument of these names that is a number above zero, else NaN."""
        values = (self._arguments.get(name) for name in names)
        return next((float(v) for v in values if isinstance(v, int | float) and 0 < v < math.inf), NAN)

    def known(self, column: str, *arguments: str) -> np.ndarray | float:
        """The column, else the first of these arguments."""
        return self[column] if column in self.table else self.argument(column, *arguments)

    @property
    def batch(self) -> np.ndarray | float:
        return self.known("global_batch_size", *(f"{of}train_batch_size" for of in ("deepspeed.", "total_", "")))

    @property
    def length(self) -> np.ndarray | float:
        return self.known("seq_length", "encoder_seq_length")


def problems(run: PartialRun, table: NumericTable, path: Path | None) -> tuple[Problem, ...]:
    """The problems of a run with their lines, which are searched for in the file `path`, where that is given."""
    c = Columns(table, run.arguments)
    checks = (_bounds, _counts, _rates) if table.rows else ()
    found = [*(f for check in checks for f in check(c)), *(_clock(run, c) if table.rows else ()), *_once(run)]
    at = {row: number for *_, row in found if row >= 0 and abs(number := float(c["iteration"][row])) < MOST_NUMBER}
    lines = find_lines(path, {*map(int, at.values())}, run.first_number, run.last_number) if path and at else {}
    last = run.last_number or None, endings.text(run.last_line)
    made = []
    for rule, column, message, row in found:
        line, text = last if row in (-1, table.rows - 1) else lines.get(int(at.get(row, -1)), (None, ""))
        made.append(Problem(rule=rule, column=column, message=message, line=line, evidence=text))
    return tuple(made)


def _bounds(c: Columns) -> Iterator[Found]:
    """Numbers that are impossible each by itself; seconds and FLOP/s as medians, as any iteration may wait."""
    for name, (low, high, message) in BOUNDS.items():
        numbers = c[name] if name in c.table else np.zeros(1)
        if np.fmin.reduce(numbers) >= low and np.fmax.reduce(numbers) <= high:
            continue
        usual = median(numbers) if name in ("sec_per_it", "flops_per_s_per_gpu") else numbers
        odd = ((usual < low) | (usual > high)) & (numbers != -1) & (numbers != 0) & (numbers == numbers)
        if odd.any():
            yield "bounds", name, f"{numbers[odd.argmax()]:.6g}: {message}", int(odd.argmax())
    end = np.fmin(c["train_iters"], c.argument("total_optimization_steps"))
    if (beyond := c["iteration"] > end).any():
        at = int(beyond.argmax())
        yield "bounds", "train_iters", f"iteration {c['iteration'][at]:.0f} of {end[at]:.0f}: beyond the last", -1
    # a uniform guess has ln(vocabulary), of which Gemma's is the largest
    vocabulary, loss = c.argument("padded_vocab_size", "vocab_size"), c["lm_loss"]
    if (loss > 2 * math.log(vocabulary if vocabulary > 1 else 262_144)).sum() > max(2, 0.99 * len(loss)):
        yield "loss", "lm_loss", f"{loss[-1]:.4g}, above twice a uniform guess: a sum, or another quantity?", -1


def _counts(c: Columns) -> Iterator[Found]:
    """Counts that fall, and samples and tokens consumed against the iterations passed."""
    for name in ("iteration", "consumed_samples", "consumed_tokens"):
        if name in c.table and (falls := c[name][1:] < c[name][:-1]).any():
            text = "falls from one line to the next: lines of two runs, or of two counts?"
            yield "jumps-back", name, text, int(falls.argmax()) + 1
    if "consumed_samples" not in c.table:
        return
    used, batch, length = np.diff(c["consumed_samples"]), c.batch, c.length
    ratio = _ratio(used, np.diff(c["iteration"]) * (batch[1:] if isinstance(batch, np.ndarray) else batch))
    if not 1 / 1.1 < ratio < 1.1:
        text = f"samples consumed between two lines are {ratio:.3g} times the iterations' batches"
        yield "count", "iteration", f"{text}: the iterations are counted otherwise, or the batch is wrong", -1
    expected = used * (length[1:] if isinstance(length, np.ndarray) else length)
    if "consumed_tokens" in c.table and (ratio := _ratio(np.diff(c["consumed_tokens"]), expected)) > 1.1:
        yield "count", "consumed_tokens", f"{ratio:.3g} times the consumed samples' tokens", -1


def _rates(c: Columns) -> Iterator[Found]:
    """Printed rates against those that follow from the seconds."""
    tokens = c.batch * c.length
    amounts = {"samples_per_second": c.batch, "tokens_per_second": tokens}
    amounts["tokens_per_gpu_per_second"] = tokens / c.argument("world_size")
    for name in amounts.keys() & c.table.names:
        if abs(math.log(ratio := _ratio(c[name] * c["sec_per_it"], amounts[name]))) > math.log(AGREE):
            text = f"printed rate times seconds is {ratio:.3g} times what the batch gives"
            yield "rate", name, f"{text}: the rate, the seconds or the batch is wrong", -1


def _clock(run: PartialRun, c: Columns) -> Iterator[Found]:
    """Time stamps that jump back, and printed seconds that are not those between the stamps.

    A pause (an evaluation, a save) makes single intervals longer than their iterations; a wrong unit makes all of them
    so, and only a wrong unit makes them shorter. So the quarter with the most seconds for its time, and the half with
    the fewest, do not count.
    """
    pairs = np.array(run.clock, float).reshape(-1, 2)
    times, day = pairs[:, 1], 86400.0
    if len(times) and times.max() <= day:  # times of day, which begin again at midnight
        times = times + day * np.cumsum(np.diff(times, prepend=times[0]) < -day / 2)
    passed = np.diff(times)
    if (passed < -60).any():  # ranks on several nodes print, whose clocks differ somewhat
        at = int((passed < -60).argmax())
        text = f"the lines' time stamps jump back by {-passed[at]:.0f} s after iteration {pairs[at, 0]:.0f}"
        yield "clock", "time_s", text, -1
    elif len(passed) and "sec_per_it" in c.table and not run.timed_by_stamps & {*run.dialects}:
        number = c["iteration"]
        whole = np.cumsum(np.nan_to_num(c["sec_per_it"]) * np.diff(number, prepend=number[0]))
        printed = np.diff(whole[np.searchsorted(number, pairs[:, 0], side="right") - 1])
        order, n = np.argsort(printed - passed), len(passed)
        few, many = order[: n - n // 4], order[n // 2 :]
        if printed[few].sum() > AGREE * passed[few].sum() + 10:
            text = f"{printed.sum():.4g} s printed for iterations of {passed.sum():.4g} s by the lines' time stamps"
            yield "clock", "sec_per_it", f"{text}: milliseconds, or the seconds of several iterations?", -1
        elif n > 3 and passed[many].sum() > 3 * printed[many].sum() + 10:  # twice may be data and evaluations
            text = f"{passed.sum():.4g} s pass by the lines' time stamps, {printed.sum():.4g} s are printed"
            yield "clock", "sec_per_it", f"{text}: another unit, or the seconds of a part?", -1


def _once(run: PartialRun) -> Iterator[Found]:
    """What is wrong with memory, evaluations and copies, which have no column of iterations."""
    for name in ("max_allocated", "max_reserved"):
        most = max((row[name] for row in run.memory.values() if name in row), default=0.0)
        if most > 288 * 2**30 or 0 < most < 2**20:  # the largest card, and less than an allocator's first block
            yield "bounds", name, f"{most:.4g} bytes are no card's memory in use; another unit?", -1
    if "lm_loss" in run.validation and (run.validation.column("lm_loss") < 0).any():
        yield "bounds", "validation", "a cross entropy is not negative", -1
    if UNNUMBERED in run.notes:
        yield "unnumbered", "iteration", UNNUMBERED, -1
    if run.copies.differing:
        text = "the loss of iteration {:.0f} is {:.6g} in one line, {:.6g} in another".format(*run.copies.differing)
        yield "copies", "lm_loss", f"{text}: of one rank each, not of the batch?", -1
    if lost := run.copies.lost:
        text = f"{len(lost)} lines or more, of iteration {lost[0]:.0f} first, lie behind others and were left out"
        yield "lost", "iteration", f"{text}: two counts, or another run?", -1


def of_card(
    printed: float, computed: Collection[float], peak: float, memory: Mapping[str, float], size: float
) -> Iterator[Problem]:
    """What contradicts the shape or the card: FLOP/s `printed` and `computed` by each definition (of shape, batch and
    seconds), the card's `peak`, the most `memory` of a rank by column, and the card's `size`; NaN or 0 for unknown."""
    low, high = min(computed, default=NAN), max(computed, default=NAN)
    column = "flops_per_s_per_gpu"
    # programs print tenths of a TFLOP/s: below one, rounding decides
    agrees = math.isnan(printed) or not computed or low / AGREE <= printed <= high * AGREE
    if not agrees and max(printed, low) >= 1e12:
        text = (
            f"{printed / 1e12:.4g} TFLOP/s printed, {low / 1e12:.4g} to {high / 1e12:.4g} by shape, batch and seconds"
        )
        yield Problem(rule="flops", column=column, message=text)
    for rate, word in ((printed, "printed"), (low, "computed")):
        if peak and rate > peak:
            text = f"{rate / 1e12:.4g} TFLOP/s {word}, {peak / 1e12:.4g} is the card's peak"
            yield Problem(rule="peak", column=column, message=text)
    for name, most in memory.items():
        if size and most > 1.02 * size:  # a catalogue's memory is rounded to whole GB or GiB
            text = f"{most / 2**30:.4g} GiB on a card of {size / 2**30:.4g} GiB"
            yield Problem(rule="memory", column=name, message=text)


def of_file(runs: Sequence[PartialRun], path: Path) -> list[tuple[Problem, ...]]:
    """The problems of each of a file's runs that only the whole file shows: a line that is of no run or of another one,
    and lines that look like iterations and were not read."""
    found: list[tuple[Problem, ...]] = [() for _ in runs]
    stray = "numbers of the file's lines jump back and forth: those of several programs or ranks, or another line's"
    for at, (old, new) in enumerate(pairwise(runs), 1):
        known = "iteration" in old.iterations and "iteration" in new.iterations
        if known and not (new.launched or new.arguments or old.endings):
            last, first = old.iterations.last("iteration"), new.iterations.at("iteration", 0)
            # one line leaps ahead of the run that goes on, or is of another kind; or two runs are mixed
            leaps = old.rows > 1 and old.iterations.at("iteration", -2) < first < last
            falls = new.rows > 1 and first < last < new.iterations.at("iteration", 1)
            if leaps or falls or min(old.rows, new.rows) <= 2:
                line, text = old.last_number, endings.text(old.last_line)
                if falls:
                    line, text = find_lines(path, {int(first)}, new.first_number).get(int(first), (0, ""))
                one = Problem(rule="jumps-back", column="iteration", message=stray, line=line or None, evidence=text)
                found[at - 1], found[at] = (*found[at - 1][:1], one)[:1], (one,)
    for form in candidates.forms(path, 1 << 18):
        at = max((i for i, run in enumerate(runs) if i == 0 or 0 < run.first_number <= form.number), default=0)
        if form.is_sure and _is_apart(form, [run for run in runs if run.rows and run.first_number]):
            text, shown = f"{form.lines} lines or more look like iterations and were not read", endings.text(form.text)
            one = Problem(rule="unread", column="iteration", message=text, line=form.number, evidence=shown)
            found[at] = (*found[at], one)
    return found


def _is_apart(form: candidates.Form, read: Sequence[PartialRun]) -> bool:
    """Whether the lines are no report of the iterations that were read: they are more than twice as many, stand before
    or behind all of these, or have other numbers."""
    rises = form.rises[form.place or 0]
    if not read or rises > 2 * sum(run.rows for run in read):
        return rises > 3
    first, last = form.iterations
    spans = [
        (t.at("iteration", 0), t.last("iteration"))
        for t in (r.iterations if r.iterations.rows else r.companion for r in read)
    ]
    outside = form.last < read[0].first_number or form.number > read[-1].last_number
    return form.is_named and (outside or all(last < begin or first > end for begin, end in spans))


def correct_units(table: NumericTable) -> str:
    """Correct times and rates in place; returns a note about the correction, "" if there was none.

    Where samples per second contradict the time by a factor of 1000, one of the two is wrong: the time if it is
    implausible, else the rate (Megatron-DeepSpeed of autumn 2021 printed samples per millisecond). Without a rate the
    first times are right: logs changed from milliseconds to seconds under the old label.
    """
    seconds = table.column("sec_per_it") if "sec_per_it" in table else np.empty(0)
    has_rate = "samples_per_second" in table and "global_batch_size" in table
    is_even = not has_rate and not np.fmax.reduce(seconds, initial=0.0) > 100 * np.fmin.reduce(seconds, initial=1e9)
    if len(seconds) < (1 if has_rate else 3) or is_even:
        return ""
    rate = table.column("samples_per_second") if has_rate else seconds
    right = table.column("global_batch_size") / rate if has_rate else median(seconds[:3])
    # a single line of a thousand times the seconds is a pause
    lasting = np.median([seconds, np.roll(seconds, 1), np.roll(seconds, -1)], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.round(np.log10((seconds if has_rate else lasting) / right) / 3, 1)  # two parts differ somewhat
    is_time = (seconds <= 0.01) | (seconds >= 6 * 3600) | (not has_rate)
    found = []
    for name, word, rows in (("sec_per_it", "time", is_time), ("samples_per_second", "rate", ~is_time)):
        if count := int((wrong := rows & (abs(off) == 1)).sum()):
            table.replace(name, np.where(wrong, table.column(name) * 1000.0**-off, table.column(name)))
            found.append(f"{count} iterations have the wrong unit of {word}")
    return "; ".join([*found, "corrected"]) if found else ""


def average_rounded(table: NumericTable) -> str:
    """Average seconds in place that are short differences of whole seconds; returns a note, "" if there were none.

    Each becomes the mean of the last minute of its stretch without a pause, or of as much as there is.
    """
    seconds, at = table.column("sec_per_it"), table.column("iteration")
    known = np.flatnonzero(np.isfinite(seconds) & np.isfinite(at))
    steps = np.diff(at[known], prepend=at[0] if known[:1].any() else at[:1] - 1) if len(known) else at[:0]
    passed = seconds[known] * steps
    # the median of differences of 10 s is off by up to half a second, a minute by a sixtieth
    if len(known) < 3 or median(passed) >= 10 or np.abs(passed - np.round(passed)).max() > 1e-3:
        return ""
    pauses = np.flatnonzero(passed > 3 * np.maximum(1.0, median(seconds[known]) * steps))
    averaged = seconds.copy()
    for start, stop in zip([0, *(pauses + 1)], [*pauses, len(known)], strict=True):
        if stop > start:
            averaged[known[start:stop]] = _means(np.round(passed[start:stop]), steps[start:stop])
    table.replace("sec_per_it", averaged)
    return "seconds are means over up to a minute, as the time stamps are whole seconds"


def _means(passed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Seconds a step over the last minute at each line; at the first lines over the first minute."""
    time, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (passed, steps))
    end: np.ndarray = np.maximum(np.arange(1, len(time)), min(len(time) - 1, int(np.searchsorted(time, 60))))
    begin = np.maximum(0, np.searchsorted(time, time[end] - 60, side="right") - 1)
    return (time[end] - time[begin]) / (count[end] - count[begin])


def _ratio(numbers: np.ndarray, others: np.ndarray | float) -> float:
    """The median ratio over the lines after the first, which includes the start; 1 where there are too few."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (numbers / others)[1:]
    middle = median(ratios[ratios > 0])
    return middle if middle == middle else 1.0


def median(numbers: np.ndarray) -> float:
    """Of the finite numbers, NaN without any. numpy's takes ten times as long on the few lines of a short run."""
    known = np.sort(numbers[np.isfinite(numbers)])
    return float(known[len(known) // 2] + known[(len(known) - 1) // 2]) / 2 if len(known) else NAN
