"""Whether a run without an end still runs, by the clock of its log's lines and the file's date."""

import calendar
import re
import time
from pathlib import Path

import numpy as np

from trilane.logs.dialects.prefixes import timestamp
from trilane.logs.reading.blocks import blocks
from trilane.logs.reading.runs import PartialRun
from trilane.logs.table import NAN, Columns

DATE = re.compile(rb"(?<!\d)(20\d\d)[-_]?(0[1-9]|1[0-2])[-_]?(0[1-9]|[12]\d|3[01])(?!\d|[ T_]\d\d:)")  # without a time
UNIX_DATE = re.compile(rb"\b([A-Z][a-z]{2}) {1,2}(\d{1,2}) \d\d:\d\d:\d\d (?:[AP]M )?(?:[A-Z]{2,5} )?(20\d\d)\b")
DAY_S = 86400.0


def still_runs(run: PartialRun, columns: Columns, path: Path, age: float) -> tuple[bool, str]:
    """Whether a run without an end still runs, and what that rests on; the file was written `age` seconds ago.

    The last line's time stamp decides, a local time without a zone: it is at most `limit` old here, or before the
    file's date in another zone, which a finished log that was copied meets by chance. Without stamps the file's date
    counts, unless the dates in the log and in its name, and its seconds, lie before it.
    """
    numbers, at = (columns.get(name, np.full(1, NAN)) for name in ("sec_per_it", "iteration"))
    seconds = float(numbers[-1] * (at[-1] - at[-2] if len(at) > 1 else 1.0))
    limit = max(60.0, 2 * seconds if seconds == seconds else 0.0)  # two lines take no longer
    if age >= limit:
        return False, ""
    now, stamp, skew = time.time(), timestamp(run.last_line), 5.0  # by which the clocks of two machines may differ
    if stamp == stamp:
        here = now + time.localtime(now).tm_gmtoff - stamp
        if -skew <= here < limit:
            return True, f"by the last line's time stamp, {max(0.0, here):.0f} s old"
        zone = (now - age - stamp + skew) % 900  # zones lie quarters of an hour apart, up to 14 hours
        if zone < min(limit, 120.0) + skew and abs(now - age - stamp) < 14 * 3600:
            return True, "running by the file's date and the last line's time stamp in another time zone"
        return False, "not running by the last line's time stamp; the file is newer"
    known = numbers[np.isfinite(numbers)]
    # evaluations and saves take up to half as long as the iterations; a run without times has SLURM's month at most
    whole = 1.5 * float(known.mean()) * (run.iteration or 1.0) if len(known) else 30 * DAY_S
    latest = _latest(path, now + DAY_S)
    if now > latest + whole + limit + 2 * DAY_S:  # a date is of some hour, in some zone
        return False, "not running by the latest date in log and file name; the file is newer"
    return True, "by the file's date; its lines have no time stamps"


def _latest(path: Path, end: float) -> float:
    """The latest time before `end` in the first and the last lines of a file and in its name; NaN without a date."""
    edge = 1 << 16
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - edge))
        tail = b"" if path.suffix == ".gz" else file.read()
    texts = (next(blocks(path))[:edge], tail, path.name.encode())
    dates = [timestamp(line) for text in texts for line in text.split(b"\n")]
    dates += [timestamp(b"-".join(found) + b" 00:00:00") for text in texts for found in DATE.findall(text)]
    for month, day, year in (found for text in texts for found in UNIX_DATE.findall(text)):
        number = next((n for n, name in enumerate(calendar.month_abbr) if name.encode() == month), 0)
        dates.append(timestamp(b"%s-%02d-%02d 00:00:00" % (year, number, int(day))) if number else NAN)
    return max((date for date in dates if date <= end), default=NAN)
