"""Clock: the time of day that a line was written, for trainers that print no seconds per iteration."""

import re
from datetime import datetime

from trilane.logs.table import NAN

STAMP = re.compile(rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")


def read(line: bytes) -> float:
    """Seconds since 1970 of the first time stamp in the line; NaN where there is none."""
    found = STAMP.search(line)
    if not found:
        return NAN
    try:
        whole = datetime.fromisoformat(f"{found[1].decode()}T{found[2].decode()}+00:00")
    except ValueError:
        return NAN
    return whole.timestamp() + (float(b"0." + found[3]) if found[3] else 0.0)
