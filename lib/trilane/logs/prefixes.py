"""What stands before and beside the numbers of a line: ranks and hosts, time stamps, timers."""

import re
from datetime import UTC, datetime

NAN = float("nan")
# What launchers put before a line: the number of a rank, a process or a host.
PREFIX = re.compile(
    rb"^\s*(?:\[default\d{1,9}\]: ?(?=\[rank))?"  # torchrun's number on the node
    rb"(?:\[default(\d{1,9})\]:|\[?[Rr]ank ?(\d{1,9})\]?:|(\d{1,6}): "
    rb"|\[\d{1,6},(\d{1,9})\]<std\w{3}>:"
    rb"|\[(\d{1,9})\]:?|[A-Za-z][\w-]{0,80}?(\d{1,9})(?:\.[\w.-]{1,200})?: )"
)
OF_RUN = re.compile(rb"\[rank(\d{1,7})\]:")  # a task or a host stands before the ranks that it has
STAMP = re.compile(rb"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
MAX_STAMP = 4096  # bytes that are searched for a stamp: of a line of thousands of iterations
MAX_PREFIX = 120  # bytes


def source(line: bytes) -> slice:
    """Where the number of the rank, process or host stands that the line's prefix names; it is
    empty without one.
    """
    match = OF_RUN.search(line[:MAX_PREFIX]) or PREFIX.match(line)
    if match:
        return slice(*match.span(match.lastindex or 0))
    return slice(0, 0)


def timestamp(line: bytes) -> float:
    """Seconds since 1970 of the first time stamp in the line, as if it were UTC; NaN if there is
    none.
    """
    match = STAMP.search(line, 0, MAX_STAMP)
    if not match:
        return NAN
    try:
        time = datetime.fromisoformat(match[0].decode().replace("/", "-"))
    except ValueError:  # no such day
        return NAN
    return time.replace(tzinfo=UTC).timestamp()
