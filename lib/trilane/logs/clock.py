"""The clock of a log's own lines: whether the run still runs, and whether its seconds are those between the lines.

Time stamps are local times without a zone, as seconds since 1970 in that zone; a file's date has a zone.
"""

import calendar
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trilane.logs.dialects.trainers import timestamp
from trilane.logs.digest import Finding, quantile
from trilane.logs.reading.line_clock import DAY_S, past_midnight
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.reader import blocks
from trilane.logs.table import NAN, NumericTable

FRESH_S = 60.0  # a log whose last line is no older than this, or than two lines take, is still being written
SKEW_S = 5.0  # by which the clocks of two machines may differ
HOUR_S = 3600.0
# Offsets from UTC that are in use somewhere (tz database), in hours.
ZONES = (*range(-12, 15), -9.5, -3.5, -2.5, 3.5, 4.5, 5.5, 5.75, 6.5, 8.75, 9.5, 10.5, 12.75, 13.75)
LATEST_ZONE_S, LONGEST_RUN_S = (
    14 * HOUR_S,
    30 * 24 * HOUR_S,
)  # of a run that prints no times; the longest limits of SLURM sites are of some weeks
SLOWER = 1.5  # than the iterations: evaluations, saves and start of a run in all
EDGE = 1 << 16  # bytes at the beginning and the end of a file in which its dates are searched for
DATE = re.compile(rb"(?<!\d)(20\d\d)[-_]?(0[1-9]|1[0-2])[-_]?(0[1-9]|[12]\d|3[01])(?!\d|[ T_]\d\d:)")  # without a time
UNIX_DATE = re.compile(rb"\b([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d) (?:[AP]M )?(?:[A-Z]{2,5} )?(20\d\d)\b")
BACK_S = 60.0  # by which a stamp may lie before an earlier one: ranks on several nodes print
TOO_LONG = 1.5  # the seconds may exceed the clock's by rounding, and by the buffers of a printing program
TOO_SHORT = 3.0  # the clock's may exceed the seconds in most lines by data, saves and evaluations, hardly three times
RESOLVED_S = 10.0  # between two stamps, whose seconds are rounded, that are compared
ROWS = 1 << 16  # that are summed at once
LEAST = 4  # intervals between stamps: a pause is not in three quarters of them


def still_runs(run: PartialRun, table: NumericTable, path: Path, age: float) -> tuple[bool, str]:
    """Whether a run without an end still runs, and what that rests on; the file was written `age` seconds ago.

    The last line's time stamp decides. In this machine's zone it is at most `limit` old; or by as much before the
    file's date in another zone in use, which a finished log that was copied meets by chance in 3 of 100 cases. Without
    stamps the file's date counts, unless the dates in the log and in its name, and its seconds, lie before it.
    """
    step = float(np.diff(table.column("iteration")[-2:])[0]) if table.rows > 1 else 1.0
    seconds = table.last("sec_per_it") * step
    limit = max(FRESH_S, 2 * seconds if seconds == seconds else 0.0)
    if age >= limit:
        return False, ""
    now, stamp = time.time(), timestamp(run.last_line)
    if stamp == stamp:
        here = now + time.localtime(now).tm_gmtoff - stamp
        if -SKEW_S <= here < limit:
            return True, f"by the last line's time stamp, {max(0.0, here):.0f} s old"
        if any(-SKEW_S <= now - age + zone * HOUR_S - stamp < limit for zone in ZONES):
            return (
                True,
                f"running by the file's date and the last line's time stamp, {_date(stamp)} in another time zone",
            )
        return False, f"not running by the last line's time stamp, {_date(stamp)}; the file is newer"
    latest = _latest(path, now + LATEST_ZONE_S)
    passed = SLOWER * _whole(table) if "sec_per_it" in table else LONGEST_RUN_S
    if now > latest + passed + limit + LATEST_ZONE_S:
        return False, f"not running by the latest date in log and file name, {_date(latest)}; the file is newer"
    return True, "by the file's date; its lines have no time stamps"


def _whole(table: NumericTable) -> float:
    """Seconds of all iterations."""
    seconds, at = table.column("sec_per_it"), table.column("iteration")
    mean = float(np.nanmean(seconds)) if np.isfinite(seconds).any() else 0.0
    return mean * float(at[-1] - at[0] + 1)


def _latest(path: Path, end: float) -> float:
    """The latest time before `end` in the first and the last lines of a file and in its name, of a date without a time
    the end of its day; NaN without one."""
    head = next(blocks(path))
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - EDGE))
        tail = file.read()
        file.seek(0)
        packed = file.read(2) == b"\x1f\x8b"
    dates = list[float]()
    for text in (head[:EDGE], b"" if packed else tail, path.name.encode()):
        days = [timestamp(b"-".join(found) + b" 00:00:00") for found in DATE.findall(text)]
        dates += [min(day + DAY_S, end) for day in days if day <= end]
        dates += [timestamp(line) for line in text.split(b"\n")]
        dates += [_unix(found) for found in UNIX_DATE.findall(text)]
    return max((date for date in dates if date <= end), default=NAN)


def _unix(found: tuple[bytes, ...]) -> float:
    """Seconds since 1970 of a date as date(1) prints it."""
    month, day, clock, year = (text.decode() for text in found)
    try:
        return float(calendar.timegm(time.strptime(f"{year} {month} {day} {clock}", "%Y %b %d %H:%M:%S")))
    except ValueError:
        return NAN


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def check(run: PartialRun, table: NumericTable) -> Iterator[Finding]:
    """Time stamps that jump back, and printed seconds that are not those between the stamps.

    A pause (an evaluation, a save) makes single intervals longer than their iterations; a wrong unit makes all of them
    so, and only a wrong unit makes them shorter.
    """
    pairs = np.array(run.clock, float).reshape(-1, 2)
    at, stamps = pairs[:, 0], past_midnight(pairs[:, 1])
    if len(back := np.flatnonzero(np.diff(stamps) < -BACK_S)):
        text = f"jump back by {stamps[back[0]] - stamps[back[0] + 1]:.0f} s after iteration {at[back[0]]:.0f}"
        yield Finding("clock", "time_s", f"the lines' time stamps {text}")
    elif not run.timed_by_stamps & set(run.dialects) and "sec_per_it" in table and len(pairs) > 1:
        yield from _seconds(table, at, stamps)


def _seconds(table: NumericTable, at: np.ndarray, stamps: np.ndarray) -> Iterator[Finding]:
    """Seconds against increasing `stamps` of the iterations `at`, both (lines,)."""
    number, seconds = table.column("iteration"), table.column("sec_per_it")
    rows, passed, whole = np.searchsorted(number, at, side="right"), np.zeros(len(at)), 0.0
    before = number[0] - 1 if len(number) < 2 else 2 * number[0] - number[1]
    for start in range(0, len(number), ROWS):  # a long log has tens of millions
        part = slice(start, start + ROWS)
        steps, before = np.diff(number[part], prepend=before), number[part][-1]
        sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(seconds[part]) * steps)]) + whole
        inside = (rows > start) & (rows < start + len(sums))
        passed[inside], whole = sums[rows[inside] - start], sums[-1]
    printed = np.diff(passed)
    clock = np.diff(stamps)
    # one iteration of several between two lines may have an evaluation in its time, which is no time of the others
    most = np.argsort(printed - clock)[: len(clock) - len(clock) // 4]
    whole, all_printed = float(clock[most].sum()), float(printed[most].sum())
    if all_printed > TOO_LONG * whole + RESOLVED_S:
        text = (
            f"{all_printed:.4g} s printed for iterations between which {whole:.4g} s passed by the lines' time stamps"
        )
        yield Finding("clock", "sec_per_it", f"{text}: milliseconds, or the seconds of several iterations?")
        return
    usual = float(np.mean(np.sort(clock)[: len(clock) - len(clock) // 4]))  # without the longest, which include pauses
    every = max(1, math.ceil(RESOLVED_S / max(usual, RESOLVED_S / len(clock))))
    clock, printed = (np.add.reduceat(x, np.arange(0, len(x), every)) for x in (clock, printed))
    known = (printed > 0) & (clock >= RESOLVED_S / 2)
    if known.sum() >= LEAST and (ratio := quantile(clock[known] / printed[known], 0.25)) > TOO_SHORT:
        text = f"in three quarters of the lines {ratio:.3g} times as long passes by their time stamps"
        yield Finding("clock", "sec_per_it", f"{text}: another unit, or the seconds of a part?")
