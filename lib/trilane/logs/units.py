"""Correction of times and rates that a log prints under the wrong unit, where its other numbers prove it."""

from collections.abc import Iterable

import numpy as np

from trilane.logs.dialects.dialect import UNITS
from trilane.logs.dialects.tables import dialects
from trilane.logs.digest import Finding
from trilane.logs.table import NumericTable

FACTOR = 1000.0  # between seconds and milliseconds
TOLERANCE = 1.4  # of that factor: two parts of one run differ somewhat
WINDOW = 3  # iterations before and after a jump that must agree
RESOLVED_S = 10.0  # between two stamps of whole seconds: the median of such differences is off by up to half a second
WINDOW_S = 60.0  # over which they are averaged then: off by at most a sixtieth
PAUSE = 3.0  # times the usual seconds, at least by so many seconds: an evaluation, which no average may include
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


def from_bits(names: Iterable[str]) -> str:
    """The note on losses that one of these dialects prints in base 2, as fairseq does; '' if none does."""
    bits = UNITS["bits"][0]
    found = any(d.name in names and ("lm_loss", bits) in {f[:2] for f in d.fields.values()} for d in dialects())
    return "the loss is in nats, the log has it in base 2" if found else ""


def average_rounded(table: NumericTable) -> tuple[str, list[Finding]]:
    """Average seconds in place that are short differences of whole seconds; returns a note, "" if there were none, and
    what is wrong where all of them are of few seconds.

    Each becomes the mean of the last WINDOW_S of its stretch without a pause, or of as much as there is.
    """
    seconds, at = table.column("sec_per_it"), table.column("iteration")
    known = np.flatnonzero(np.isfinite(seconds) & np.isfinite(at))
    if not len(known):
        return "", []
    before = float(at[0] if known[0] else at[0] - 1)  # the first line has no time before it
    steps = np.diff(at[known], prepend=before)
    passed = seconds[known] * steps
    if np.median(passed) >= RESOLVED_S or np.abs(passed - np.round(passed)).max() > 1e-3:
        return "", []
    whole = float(passed.sum())
    text = f"of {whole:.0f} s in all between time stamps of whole seconds: off by up to {100 / whole:.0f} %"
    found = [Finding("resolution", "sec_per_it", text)] if whole < RESOLVED_S else []
    if len(known) < WINDOW:
        return "", found
    pauses = np.flatnonzero(passed > PAUSE * np.maximum(1.0, np.median(seconds[known]) * steps))
    averaged = seconds.copy()
    for start, stop in zip([0, *(pauses + 1)], [*pauses, len(known)], strict=True):
        if stop > start:
            averaged[known[start:stop]] = _means(np.round(passed[start:stop]), steps[start:stop])
    table.replace("sec_per_it", averaged)
    return f"seconds are means over up to {WINDOW_S:.0f} s, as the time stamps are whole seconds", found


def _means(passed: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Seconds a step over the last WINDOW_S at each line; at the first lines over the first WINDOW_S."""
    time, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (passed, steps))
    first = min(len(time) - 1, int(np.searchsorted(time, WINDOW_S)))
    end: np.ndarray = np.maximum(np.arange(1, len(time)), first)
    begin = np.maximum(0, np.searchsorted(time, time[end] - WINDOW_S, side="right") - 1)
    return (time[end] - time[begin]) / (count[end] - count[begin])


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
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = seconds[1:] / seconds[:-1]
    jumps = np.flatnonzero((ratios > FACTOR / 3) | (ratios < 3 / FACTOR)) + 1
    if not len(jumps):
        return np.ones(1)
    factors, current, begin = np.ones(len(seconds)), 1.0, 0
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
