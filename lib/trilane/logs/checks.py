"""Checks: numbers of a run that cannot be right."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from trilane.logs.table import NAN
from trilane.utils.frozen import frozen
from trilane.utils.validation import shipped_json

MOST_NUMBER = 1e15  # of an iteration; a larger one is damaged
# factor between two rates of one run: one may be a running mean, or leave out what the other counts
AGREE = 1.5
# Seconds: the slowest row of data/measured.csv takes 870. FLOP/s: twice the dense 16-bit peak of a
# B200. 0 and -1 stand for "not measured" (nanoGPT, DeepSpeed).
BOUNDS = shipped_json("log_bounds")
BY_MEDIAN = ("sec_per_it", "flops_per_s_per_gpu")  # as any iteration may wait
# Columns without influence on how long an iteration takes, or what it computes.
HARMLESS = ("lm_loss", "grad_norm", "learning_rate", "mfu")
EMPTY = np.empty(0)
ROUNDED = 1e12  # FLOP/s: programs print tenths of a TFLOP/s; below one, rounding decides


@frozen
class Problem:
    """What cannot be right in a column, or cannot be known: `rule` by its short name."""

    rule: str
    column: str
    message: str

    def __str__(self) -> str:
        return f"{self.column}: {self.message}"


def problems(iterations: Mapping[str, np.ndarray]) -> Iterator[Problem]:
    """The problems of a run with these columns."""
    if not iterations:
        return
    if np.isnan(iterations["iteration"]).any():
        text = "the log does not number its iterations (no progress bar)"
        yield Problem(rule="unnumbered", column="iteration", message=text)
    for name, (low, high, message) in BOUNDS.items():
        numbers = iterations.get(name, EMPTY)
        if not len(numbers) or (low <= numbers.min() and numbers.max() <= high):
            continue  # without a copy of a long log's column
        numbers = numbers[(numbers != 0) & (numbers != -1)]
        if name in BY_MEDIAN:
            numbers = np.array([median(numbers)])
        odd = numbers[(numbers < low) | (numbers > high)]
        if len(odd):
            yield Problem(rule="bounds", column=name, message=f"{odd[0]:.6g}: {message}")


def of_card(printed: float, computed: Collection[float], peak: float) -> Iterator[Problem]:
    """What contradicts the shape or the card: FLOP/s `printed` and `computed` by each definition
    (of shape, batch and seconds), and the card's `peak`; NaN or 0 for unknown.
    """
    low = min(computed, default=NAN)
    high = max(computed, default=NAN)
    column = "flops_per_s_per_gpu"
    is_off = printed < low / AGREE or printed > high * AGREE
    if is_off and max(printed, low) >= ROUNDED:
        ours = f"{low / 1e12:.4g} to {high / 1e12:.4g} by shape, batch and seconds"
        text = f"{printed / 1e12:.4g} TFLOP/s printed, {ours}"
        yield Problem(rule="flops", column=column, message=text)
    for rate in (printed, low):
        if peak and rate > peak:
            text = f"{rate / 1e12:.4g} TFLOP/s, {peak / 1e12:.4g} is the card's peak"
            yield Problem(rule="peak", column=column, message=text)


def median(numbers: np.ndarray) -> float:
    """Of the finite numbers, NaN without any."""
    finite = numbers[np.isfinite(numbers)]
    return float(np.median(finite)) if len(finite) else NAN
