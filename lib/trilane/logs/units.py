"""Units: where a log's label of the unit lies, and what proves it."""

import numpy as np

from trilane.logs.table import Table

FACTOR = 1000.0  # between seconds and milliseconds
NEAR = 1.4  # how far from it a jump may be: two stretches of one run differ by some
STRETCH = 3  # iterations before and after a jump that must agree


def mend(table: Table) -> str:
    """Put right the seconds that were printed under the other unit's label; a sentence about it, "" for none.

    Proof is the line's own rate where it prints samples per second; else a lasting jump by a factor of a thousand. In
    that case the first stretch is believed: logs changed from milliseconds to seconds under an old label.
    """
    if "sec_per_it" not in table:
        return ""
    seconds = table.column("sec_per_it")
    factors = _by_rate(table, seconds) if "samples_per_second" in table else _by_jump(seconds)
    wrong = int((factors != 1).sum())
    if wrong:
        table.replace("sec_per_it", seconds * factors)
        return f"{wrong} iterations stand under the wrong unit of time; they were taken as what they are"
    return ""


def _by_rate(table: Table, seconds: np.ndarray) -> np.ndarray:
    factors = np.ones(len(seconds))
    if "global_batch_size" not in table:
        return factors
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(seconds * table.column("samples_per_second") / table.column("global_batch_size"))
    factors[np.abs(ratio - np.log(FACTOR)) < np.log(NEAR)] = 1 / FACTOR
    factors[np.abs(ratio + np.log(FACTOR)) < np.log(NEAR)] = FACTOR
    return factors


def _by_jump(seconds: np.ndarray) -> np.ndarray:
    factors, now = np.ones(len(seconds)), 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = seconds[1:] / seconds[:-1]
    jumps = np.flatnonzero((ratios > FACTOR / 3) | (ratios < 3 / FACTOR)) + 1
    for place in jumps.tolist():
        before, after = seconds[max(0, place - STRETCH) : place], seconds[place : place + STRETCH]
        if min(len(before), len(after)) < STRETCH or not (_agree(before) and _agree(after)):
            continue
        ratio = float(np.median(after) / np.median(before))
        for sign in (1.0, -1.0):
            if abs(np.log(ratio * FACTOR**sign)) < np.log(NEAR):
                now *= FACTOR**sign
        factors[place:] = now
    return factors


def _agree(seconds: np.ndarray) -> bool:
    return bool(seconds.max() < 3 * seconds.min())
