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
# Columns without influence on how long an iteration takes, or what it computes.
HARMLESS = ("lm_loss", "grad_norm", "learning_rate", "mfu")


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
    found = [("unnumbered", "iteration", UNNUMBERED)] if UNNUMBERED in run.notes else []
    if run.rows:
        found = [*_bounds(columns), *_trouble(columns), *_counts(columns, run.arguments), *found]
    return tuple(
        Problem(rule=rule, column=column, message=message) for rule, column, message in found
    )


def _bounds(columns: Columns) -> Iterator[tuple[str, str, str]]:
    """Numbers that are impossible each by itself; seconds and FLOP/s as medians, as any iteration
    may wait.
    """
    for name in BOUNDS.keys() & columns.keys():
        (low, high, message), numbers = BOUNDS[name], columns[name]
        # a rate below 0.05 is printed as 0.0
        usual = (
            median(numbers[numbers != 0])
            if name in ("sec_per_it", "flops_per_s_per_gpu")
            else numbers
        )
        odd = ((usual < low) | (usual > high)) & (numbers != -1) & (numbers == numbers)
        if (odd := odd & ((numbers != 0) | (name == "lm_loss"))).any():
            number, iteration = numbers[at := odd.argmax()], columns["iteration"][at]
            where = f" at iteration {iteration:.0f}" * bool(iteration == iteration)
            yield "bounds", name, f"{number:.6g}{where}: {message}"


def _trouble(columns: Columns) -> Iterator[tuple[str, str, str]]:
    """Numbers that are possible, and mean that nothing is learned."""
    number, none = columns["iteration"], np.full(len(columns["iteration"]), NAN)
    norm, skipped, nan = (columns.get(name, none) for name in ("grad_norm", "skipped", "nan"))
    is_nan = (nan > 0) & ~(skipped > 0) & ("grad_norm" in columns)
    for odd, meaning in (
        # a program that does not compute the norm prints 0 on every line (Megatron-DeepSpeed of
        # 2021)
        ((norm == 0) & (norm > 0).any(), "exactly 0: no gradient arrives"),
        (is_nan & np.isnan(norm), "NaN: so are the weights from here on"),
    ):
        if odd.any():
            yield (
                "trouble",
                "grad_norm",
                f"{meaning} (iteration {number[odd.argmax()]:.0f}; {odd.sum()} in all)",
            )
    is_skipped = skipped >= np.diff(number, prepend=number[0] - 1)
    for first, end in np.flatnonzero(np.diff(is_skipped, prepend=False, append=False)).reshape(
        -1, 2
    ):
        # a loss scale of 2^32, where the search for it begins, is 1 after so many halvings
        if (count := number[end - 1] - number[first] + 1) > 32:
            yield (
                "trouble",
                "skipped",
                f"{count:.0f} iterations in a row from {number[first]:.0f} on",
            )
            return


def _counts(columns: Columns, arguments: Mapping[str, Value]) -> Iterator[tuple[str, str, str]]:
    """Counts that fall; consumed samples, and printed rates, against what iterations and batch
    give.
    """
    for name in {"iteration", "consumed_samples", "consumed_tokens"} & columns.keys():
        if (falls := columns[name][1:] < columns[name][:-1]).any():
            yield (
                "jumps-back",
                name,
                f"falls after iteration {columns['iteration'][falls.argmax()]:.0f}",
            )

    def known(name: str, *others: str) -> np.ndarray:
        """The column, else the first of these arguments."""
        one = np.broadcast_to(_argument(arguments, name, *others), len(columns["iteration"]))
        return columns.get(name, one)

    batch = known(
        "global_batch_size",
        "deepspeed.train_batch_size",
        "total_train_batch_size",
        "train_batch_size",
    )
    length, seconds = known("seq_length", "encoder_seq_length"), known("sec_per_it")
    gpus = {"tokens_per_gpu_per_second": known("world_size")}
    for name in {"samples_per_second", "tokens_per_second", *gpus} & columns.keys():
        right = (
            batch
            if name == "samples_per_second"
            else columns.get("tokens_per_batch", batch * length)
        )
        ratio = _ratio(columns[name] * seconds * gpus.get(name, 1.0), right)
        if not 1 / AGREE < ratio < AGREE:
            yield "rate", name, f"{ratio:.3g} times what batch and seconds give"
    used = _ratio(np.diff(known("consumed_samples")), np.diff(columns["iteration"]) * batch[1:])
    if not 1 / 1.1 < used < 1.1:
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
    low, high = min(computed, default=NAN), max(computed, default=NAN)
    column = "flops_per_s_per_gpu"
    # programs print tenths of a TFLOP/s: below one, rounding decides
    agrees = math.isnan(printed) or not computed or low / AGREE <= printed <= high * AGREE
    if not agrees and max(printed, low) >= 1e12:
        text = f"{printed / 1e12:.4g} TFLOP/s printed, {low / 1e12:.4g} to {high / 1e12:.4g} by shape, batch and seconds"
        yield Problem(rule="flops", column=column, message=text)
    for rate, word in ((printed, "printed"), (low, "computed")):
        if peak and rate > peak:
            text = f"{rate / 1e12:.4g} TFLOP/s {word}, {peak / 1e12:.4g} is the card's peak"
            yield Problem(rule="peak", column=column, message=text)
    for name, most in memory.items():
        if size and most > 1.02 * size:  # a catalogue's memory is rounded to whole GB or GiB
            text = f"{most / 2**30:.4g} GiB on a card of {size / 2**30:.4g} GiB"
            yield Problem(rule="memory", column=name, message=text)


def correct_units(columns: Columns) -> str:
    """Correct times and rates in place; returns a note about the correction, "" if there was none.

    Where samples per second contradict the time by a factor of 1000, one of the two is wrong: the
    time if it is implausible, else the rate (Megatron-DeepSpeed of autumn 2021 printed samples per
    millisecond). Without a rate the first times are right: logs changed from milliseconds to
    seconds under the old label.
    """
    seconds, found = columns.get("sec_per_it", np.empty(0)), list[str]()
    has_rate = columns.keys() >= {"samples_per_second", "global_batch_size"}
    is_even = not has_rate and not np.fmax.reduce(seconds, initial=0.0) > 100 * np.fmin.reduce(
        seconds, initial=1e9
    )
    if len(seconds) < (1 if has_rate else 3) or is_even:
        return ""
    right = (
        columns["global_batch_size"] / columns["samples_per_second"]
        if has_rate
        else median(seconds[:3])
    )
    # a single line of a thousand times the seconds is a pause
    lasting = np.median([seconds, np.roll(seconds, 1), np.roll(seconds, -1)], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.round(
            np.log10((seconds if has_rate else lasting) / right) / 3, 1
        )  # two parts differ somewhat
    is_time = (seconds <= 0.01) | (seconds >= 6 * 3600) | (not has_rate)
    for name, word, rows in (
        ("sec_per_it", "time", is_time),
        ("samples_per_second", "rate", ~is_time),
    ):
        if count := int((wrong := rows & (abs(off) == 1)).sum()):
            columns[name] = np.where(wrong, columns[name] * 1000.0**-off, columns[name])
            found.append(f"{count} iterations have the wrong unit of {word}")
    return "; ".join([*found, "corrected"]) if found else ""


def _argument(arguments: Mapping[str, Value], *names: str) -> float:
    """The first argument of these names that is a number above zero, else NaN."""
    values = (arguments.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and 0 < v < math.inf), NAN)


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
    known = np.sort(numbers[np.isfinite(numbers)])
    return float(known[len(known) // 2] + known[(len(known) - 1) // 2]) / 2 if len(known) else NAN
