"""Correction of times and rates that a log prints under the wrong unit, where its other numbers prove it."""

import numpy as np

from trilane.logs.table import NumericTable

FACTOR = 1000.0  # between seconds and milliseconds
TOLERANCE = 1.4  # of that factor: two parts of one run differ somewhat
WINDOW = 3  # iterations before and after a jump that must agree
PLAUSIBLE_S = (0.01, 6 * 3600.0)  # seconds per iteration; outside of it the rate is trusted instead


def correct_units(table: NumericTable) -> str:
    """Correct times and rates in place; returns a note about the correction, "" if there was none.

    Where samples per second contradict the time by a factor of 1000, one of the two is wrong: the time if it is
    implausible, else the rate (Megatron-DeepSpeed of autumn 2021 printed samples per millisecond). Without a rate, a
    lasting jump by that factor is required, and the values before it are trusted: logs changed from milliseconds to
    seconds under the old label.
    """
    if "sec_per_it" not in table:
        return ""
    seconds = table.column("sec_per_it")
    if "samples_per_second" in table and "global_batch_size" in table:
        ratio = _unit_factor(table, seconds)
        plausible = (seconds > PLAUSIBLE_S[0]) & (seconds < PLAUSIBLE_S[1])
        factors, rates = np.where(plausible, 1.0, 1 / ratio), np.where(plausible, 1 / ratio, 1.0)
        _replace(table, "samples_per_second", rates)
    else:
        factors, rates = _by_jump(seconds), np.ones(0)
    _replace(table, "sec_per_it", factors)
    wrong = {"time": int((factors != 1).sum()), "rate": int((rates != 1).sum())}
    notes = [f"{n} iterations have the wrong unit of {what}" for what, n in wrong.items() if n]
    return "; ".join(notes) + "; corrected" if notes else ""


def _replace(table: NumericTable, name: str, factors: np.ndarray) -> None:
    if (factors != 1).any():
        table.replace(name, table.column(name) * factors)


def _unit_factor(table: NumericTable, seconds: np.ndarray) -> np.ndarray:
    """Per row, the factor by which seconds x rate misses the batch: 1000, 1/1000, or 1 for anything else."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(seconds * table.column("samples_per_second") / table.column("global_batch_size"))
    off = np.ones(len(seconds))
    off[np.abs(ratio - np.log(FACTOR)) < np.log(TOLERANCE)] = FACTOR
    off[np.abs(ratio + np.log(FACTOR)) < np.log(TOLERANCE)] = 1 / FACTOR
    return off


def _by_jump(seconds: np.ndarray) -> np.ndarray:
    factors, current, begin = np.ones(len(seconds)), 1.0, 0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = seconds[1:] / seconds[:-1]
    jumps = np.flatnonzero((ratios > FACTOR / 3) | (ratios < 3 / FACTOR)) + 1
    for start in jumps.tolist():
        before, after = seconds[max(0, start - WINDOW) : start], seconds[start : start + WINDOW]
        if min(len(before), len(after)) < WINDOW or not (_agree(before) and _agree(after)):
            continue
        factors[begin:start], begin = current, start
        ratio = float(np.median(after) / np.median(before))
        for sign in (1.0, -1.0):
            if abs(np.log(ratio * FACTOR**sign)) < np.log(TOLERANCE):
                current *= FACTOR**sign
    factors[begin:] = current
    return factors


def _agree(seconds: np.ndarray) -> bool:
    return bool(seconds.max() < 3 * seconds.min())
