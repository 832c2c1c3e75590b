"""The gate of plausibility, continued where the model's shape and the card are known: FLOP/s and memory."""

import math
from collections.abc import Iterator

import numpy as np

from trilane.analysis.flops import DEFINITIONS
from trilane.analysis.run_config import RunConfig
from trilane.logs.plausibility import AGREE
from trilane.logs.problems import Problem
from trilane.logs.run import RunLog

ROUNDED_FLOPS_PER_S = 1e12  # programs print tenths of a TFLOP/s: below one, rounding decides
# A rate without a precision may be of 8 bits, twice that of 16.
UNKNOWN_PRECISION = 2.0
CARD_BYTES = 1.02  # of the catalogue's memory, rounded to whole GB or GiB
# Columns without influence on the seconds per iteration of a measurement.
HARMLESS = ("lm_loss", "grad_norm", "learning_rate", "mfu", "train_iters")


def shape_problems(
    log: RunLog, config: RunConfig, counts: np.ndarray, computed: dict[str, float]
) -> tuple[Problem, ...]:
    """What contradicts the shape or the card in a log whose rows `counts` count; FLOP/s `computed` by definition."""
    return (*_rate(log, config, counts, computed), *_memory(log, config))


def _rate(log: RunLog, config: RunConfig, counts: np.ndarray, computed: dict[str, float]) -> Iterator[Problem]:
    """FLOP/s: printed against computed, and either against the card's peak."""
    known = [computed[name] for name in DEFINITIONS if name in computed]
    low, high = min(known, default=math.nan), max(known, default=math.nan)
    printed = math.nan
    if "flops_per_s_per_gpu" in log.iterations:
        rates = log.iterations["flops_per_s_per_gpu"].to_numpy(float)
        rates = rates[counts & np.isfinite(rates)] if counts.any() else rates[np.isfinite(rates)]
        printed = float(np.median(rates)) if len(rates) else math.nan
    agrees = not known or math.isnan(printed) or low / AGREE <= printed <= high * AGREE
    if not agrees and max(printed, low) >= ROUNDED_FLOPS_PER_S:
        text = (
            f"{printed / 1e12:.4g} TFLOP/s printed, {low / 1e12:.4g} to {high / 1e12:.4g} by shape, batch and seconds"
        )
        yield Problem(rule="flops", column="flops_per_s_per_gpu", message=text)
    peak = config.peak_flops_per_s * (1.0 if config.precision else UNKNOWN_PRECISION)
    for rate, word in ((printed, "printed"), (low, "computed")):
        if peak and rate > peak:
            text = f"{rate / 1e12:.4g} TFLOP/s {word}, {peak / 1e12:.4g} is the peak of {config.card}"
            yield Problem(rule="peak", column="flops_per_s_per_gpu", message=text)


def _memory(log: RunLog, config: RunConfig) -> Iterator[Problem]:
    """Peak memory of a rank beyond its card's."""
    for name in ("max_allocated", "max_reserved"):
        most = float(log.memory[name].max()) if name in log.memory else math.nan
        if config.card_bytes and most > CARD_BYTES * config.card_bytes:
            text = f"{most / 2**30:.4g} GiB on a card of {config.card_bytes / 2**30:.4g} GiB"
            yield Problem(rule="memory", column=name, message=text)
