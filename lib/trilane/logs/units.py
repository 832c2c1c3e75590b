"""Units: where a log's label of the unit lies, and what proves it."""

import numpy as np

from trilane.logs.table import Table

FACTOR = 1000.0  # between seconds and milliseconds
NEAR = 1.4  # how far from it a jump may be: two stretches of one run differ by some
STRETCH = 3  # iterations before and after a jump that must agree
LIKELY_S = (0.01, 6 * 3600.0)  # what an iteration may take: outside of it a label is not believed against the rate


def mend(table: Table) -> str:
    """Put right what was printed under the other unit's label; a sentence about it, "" for none.

    Where the line's samples per second contradict its time by a factor of a thousand, one of the two is wrong: the
    time where it would be no likely one, else the rate (Megatron-DeepSpeed of autumn 2021 printed samples per
    millisecond). Without a rate it takes a lasting jump by that factor; then the first stretch is believed: logs
    changed from milliseconds to seconds under an old label.
    """
    if "sec_per_it" not in table:
        return ""
    seconds = table.column("sec_per_it")
    if "samples_per_second" in table and "global_batch_size" in table:
        off = _off(table, seconds)
        likely = (seconds > LIKELY_S[0]) & (seconds < LIKELY_S[1])
        factors, rates = np.where(likely, 1.0, 1 / off), np.where(likely, 1 / off, 1.0)
        _replace(table, "samples_per_second", rates)
    else:
        factors, rates = _by_jump(seconds), np.ones(0)
    _replace(table, "sec_per_it", factors)
    wrong = {"time": int((factors != 1).sum()), "rate": int((rates != 1).sum())}
    said = [f"{n} iterations stand under the wrong unit of {what}" for what, n in wrong.items() if n]
    return "; ".join(said) + "; they were taken as what they are" if said else ""


def _replace(table: Table, name: str, factors: np.ndarray) -> None:
    if (factors != 1).any():
        table.replace(name, table.column(name) * factors)


def _off(table: Table, seconds: np.ndarray) -> np.ndarray:
    """By what factor seconds times rate miss the batch: a thousand, a thousandth, or 1 for anything else."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(seconds * table.column("samples_per_second") / table.column("global_batch_size"))
    off = np.ones(len(seconds))
    off[np.abs(ratio - np.log(FACTOR)) < np.log(NEAR)] = FACTOR
    off[np.abs(ratio + np.log(FACTOR)) < np.log(NEAR)] = 1 / FACTOR
    return off


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
