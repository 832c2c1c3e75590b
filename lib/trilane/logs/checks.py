"""Checks: numbers of a run that cannot be right; and units that other numbers correct."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.reading.runs import PartialRun
from trilane.logs.reading.trainer_dicts import UNNUMBERED
from trilane.logs.table import NAN, Columns

MOST_NUMBER = 1e15  # of an iteration; a larger one is damaged
# factor between two rates of one run: one may be a running mean, or leave out what the other counts
AGREE = 1.5
AGREE_SAMPLES = 1.1
# Seconds: the slowest row of data/measured.csv takes 870. FLOP/s: twice the dense 16-bit peak of a
# B200. 0 and -1 stand for "not measured" (nanoGPT, DeepSpeed), but a loss of 0 for one that is NaN
# (the Trainer's logging_nan_inf_filter).
BOUNDS = {
    "sec_per_it": (2e-4, 3600.0, "seconds an iteration: another unit?"),
    "grad_norm": (0.0, math.inf, "a norm is not negative"),
    "learning_rate": (0.0, 1.0, "a learning rate lies between 0 and 1"),
    "lm_loss": (1e-30, math.inf, "a cross entropy is above 0: NaN, or no label?"),
    "mfu": (0.0, 1.0, "above the peak; a percentage?"),
    "flops_per_s_per_gpu": (1e6, 4.5e15, "FLOP/s: another unit?"),
}
BY_MEDIAN = ("sec_per_it", "flops_per_s_per_gpu")  # as any iteration may wait
# Columns without influence on how long an iteration takes, or what it computes.
HARMLESS = ("lm_loss", "grad_norm", "learning_rate", "mfu")
# names of the batch among arguments
BATCH = ("deepspeed.train_batch_size", "total_train_batch_size", "train_batch_size")
ROUNDED = 1e12  # FLOP/s: programs print tenths of a TFLOP/s; below one, rounding decides
CARD = 1.02  # a catalogue's memory is rounded to whole GB or GiB
# seconds of an iteration that are plausible, where samples per second contradict them
SHORT_S = 0.01
LONG_S = 6 * 3600
JUMP = 100  # between the shortest and the longest time of a run whose unit may have changed
Found = Iterator[tuple[str, str, str]]  # rule, column, message


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What cannot be right in a column, or cannot be known: `rule` by its short name; of a
    hand-written row the number of its `line` and its text, `evidence`.
    """

    rule: str
    column: str
    message: str
    line: int | None = None
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return f"{self.column}: {self.message}{where}"


def problems(run: PartialRun, columns: Columns) -> tuple[Problem, ...]:
    """The problems of a run."""
    every: list[tuple[str, str, str]] = []
    if run.rows:
        every += _bounds(columns)
        every += _counts(columns, run.arguments)
    if UNNUMBERED in run.notes:
        every.append(("unnumbered", "iteration", UNNUMBERED))
    return tuple(Problem(rule=rule, column=name, message=text) for rule, name, text in every)


def _bounds(columns: Columns) -> Found:
    """Numbers that are impossible each by itself."""
    for name, (low, high, message) in BOUNDS.items():
        if name not in columns:
            continue
        numbers = columns[name]
        is_measured = (numbers == numbers) & (numbers != -1)
        if name != "lm_loss":
            is_measured &= numbers != 0
        usual = numbers
        if name in BY_MEDIAN:
            usual = np.full(len(numbers), median(numbers[numbers != 0]))
        is_odd = ((usual < low) | (usual > high)) & is_measured
        if is_odd.any():
            at = is_odd.argmax()
            iteration = columns["iteration"][at]
            if iteration == iteration:
                where = f" at iteration {iteration:.0f}"
            else:
                where = ""
            yield "bounds", name, f"{numbers[at]:.6g}{where}: {message}"


def _counts(columns: Columns, arguments: Mapping[str, Value]) -> Found:
    """Counts that fall; consumed samples, and printed rates, against what iterations and batch
    give.
    """
    number = columns["iteration"]
    for name in ("iteration", "consumed_samples", "consumed_tokens"):
        if name in columns:
            falls = columns[name][1:] < columns[name][:-1]
            if falls.any():
                text = f"falls after iteration {number[falls.argmax()]:.0f}"
                yield "jumps-back", name, text

    def of(name: str, *others: str) -> np.ndarray:
        """The column, else the first of these arguments."""
        return columns.get(name, np.full(len(number), _argument(arguments, name, *others)))

    batch = of("global_batch_size", *BATCH)
    tokens = columns.get("tokens_per_batch", batch * of("seq_length", "encoder_seq_length"))
    seconds = of("sec_per_it")
    rates = {
        "samples_per_second": batch,
        "tokens_per_second": tokens,
        "tokens_per_gpu_per_second": tokens / of("world_size"),
    }
    for name, amount in rates.items():
        if name in columns:
            ratio = _ratio(columns[name] * seconds, amount)
            if not 1 / AGREE < ratio < AGREE:
                yield "rate", name, f"{ratio:.3g} times what batch and seconds give"
    used = _ratio(np.diff(of("consumed_samples")), np.diff(number) * batch[1:])
    if not 1 / AGREE_SAMPLES < used < AGREE_SAMPLES:
        yield "count", "iteration", f"samples are {used:.3g} times what iterations and batch give"


def of_card(
    printed: float,
    computed: Collection[float],
    peak: float,
    memory: Mapping[str, float],
    size: float,
) -> Iterator[Problem]:
    """What contradicts the shape or the card: FLOP/s `printed` and `computed` by each definition
    (of shape, batch and seconds), the card's `peak`, the most `memory` of a rank by column, and the
    card's `size`; NaN or 0 for unknown.
    """
    low = min(computed, default=NAN)
    high = max(computed, default=NAN)
    column = "flops_per_s_per_gpu"
    is_off = printed < low / AGREE or printed > high * AGREE
    if is_off and max(printed, low) >= ROUNDED:
        ours = f"{low / 1e12:.4g} to {high / 1e12:.4g} by shape, batch and seconds"
        text = f"{printed / 1e12:.4g} TFLOP/s printed, {ours}"
        yield Problem(rule="flops", column=column, message=text)
    for rate, word in ((printed, "printed"), (low, "computed")):
        if peak and rate > peak:
            text = f"{rate / 1e12:.4g} TFLOP/s {word}, {peak / 1e12:.4g} is the card's peak"
            yield Problem(rule="peak", column=column, message=text)
    for name, most in memory.items():
        if size and most > CARD * size:
            text = f"{most / 2**30:.4g} GiB on a card of {size / 2**30:.4g} GiB"
            yield Problem(rule="memory", column=name, message=text)


def correct_units(columns: Columns) -> str:
    """Correct times and rates in place; returns a note about the correction, "" if there was none.

    Where samples per second contradict the time by a factor of 1000, one of the two is wrong: the
    time if it is implausible, else the rate (Megatron-DeepSpeed of autumn 2021 printed samples per
    millisecond). Without a rate the first times are right: logs changed from milliseconds to
    seconds under the old label.
    """
    seconds = columns.get("sec_per_it", np.empty(0))
    if columns.keys() >= {"sec_per_it", "samples_per_second", "global_batch_size"}:
        factor = _thousands(seconds * columns["samples_per_second"], columns["global_batch_size"])
        is_time = (seconds <= SHORT_S) | (seconds >= LONG_S)
    elif len(seconds) > 2 and np.nanmax(seconds, initial=0) > JUMP * np.nanmin(
        seconds, initial=1e9
    ):
        # a single line of a thousand times the seconds is a pause
        lasting = np.median([seconds, np.roll(seconds, 1), np.roll(seconds, -1)], axis=0)
        factor = _thousands(lasting, median(seconds[:3]))
        is_time = np.full(len(seconds), True)
    else:
        return ""
    notes: list[str] = []
    faults = (("sec_per_it", "time", is_time), ("samples_per_second", "rate", ~is_time))
    for name, word, rows in faults:
        is_wrong = rows & (abs(factor) == 1)
        if is_wrong.any():
            right = columns[name] * 1000.0**-factor
            columns[name] = np.where(is_wrong, right, columns[name])
            notes.append(f"{is_wrong.sum()} iterations have the wrong unit of {word}")
    if notes:
        return "; ".join([*notes, "corrected"])
    return ""


def _thousands(numbers: np.ndarray, right: np.ndarray | float) -> np.ndarray:
    """How many factors of 1000 numbers are above the right ones; two parts differ somewhat."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.round(np.log10(numbers / right) / 3, 1)


def _argument(arguments: Mapping[str, Value], *names: str) -> float:
    """The first argument of these names that is a number above zero, else NaN."""
    for name in names:
        value = arguments.get(name)
        if isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
    return NAN


def _ratio(numbers: np.ndarray, others: np.ndarray) -> float:
    """The median ratio over the lines after the first, which includes the start; 1 where there are
    too few.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (numbers / others)[1:]
    middle = median(ratios[ratios > 0])
    return middle if middle == middle else 1.0


def median(numbers: np.ndarray) -> float:
    """Of the finite numbers, NaN without any. numpy's takes ten times as long on the few lines of a
    short run.
    """
    finite = np.sort(numbers[np.isfinite(numbers)])
    if not len(finite):
        return NAN
    return float(finite[len(finite) // 2] + finite[(len(finite) - 1) // 2]) / 2
