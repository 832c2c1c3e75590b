"""The last call of each rank, read from the end of its trace: of Python's `trace`, or of trilane's ring buffer."""

import re
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.files import natural
from trilane.utils.tables import grouped
from trilane.utils.validation import require, require_folder
from trilane.workspace.heartbeat import read_calls

# Library/trace.py: a function entered, then its lines as they are run.
ENTERED = re.compile(rb"^ --- modulename: (.+?), funcname: (.+)$", re.M)
RAN = re.compile(rb"^([\w.<>/-]+\.py|<[\w ]+>)\((\d+)\): ?(.*)$", re.M)
RING_LINE = re.compile(r"^\d+\.\d+ ([<>]) (.*)$")
WINDOW = 64 << 10  # bytes read first; more, up to LARGEST, where no call begins in them
LARGEST = 8 << 20
THREADS = 8  # most time is spent waiting for a shared file system
SHOWN = 12  # ranks named in a line


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """The end of a rank's trace: the function entered last, and the last line run."""

    rank: str
    function: str
    line: str
    bytes: int


def last_calls(folder: Path) -> list[LastCall]:
    """The last call of every trace file below `folder`, in the order of their names; ValueError where there is none.

    Python's `trace` writes ` --- modulename: M, funcname: F` and then `file.py(12): code` for each line; a ring buffer
    is a file `<rank>.calls`. Other files are ignored. Only the end of a file is read.
    """
    require_folder("folder", folder)
    paths = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: natural(p.name))
    with ThreadPoolExecutor(THREADS) as pool:
        found = [call for call in pool.map(last_call, paths) if call is not None]
    require(bool(found), "folder", folder, "holds no trace (of Python's trace module, or *.calls)")
    return found


def last_call(path: Path) -> LastCall | None:
    """The end of one trace; None for a file that is no trace."""
    size = path.stat().st_size
    if path.suffix == ".calls":
        return _ring_call(path, size)
    window = WINDOW
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - window))
            tail = file.read(window)
        entered, ran = (next(iter(deque(pattern.finditer(tail), maxlen=1)), None) for pattern in (ENTERED, RAN))
        if entered is not None:
            function = f"{entered[2].decode('utf-8', 'replace').rstrip()} ({entered[1].decode('utf-8', 'replace')})"
            return LastCall(rank=label(path), function=function, line=_line(ran), bytes=size)
        # A loop of a hundred thousand lines may call nothing: read further back, but only in what looks like a trace.
        if ran is None or window >= min(size, LARGEST):
            return LastCall(rank=label(path), function="", line=_line(ran), bytes=size) if ran else None
        window *= 8


def groups(calls: Iterable[LastCall]) -> list[tuple[str, str, list[str]]]:
    """(function, line, ranks) for each place where traces end; the rarest first, which are the suspects."""
    same = grouped(calls, lambda call: (call.function, call.line))
    places = ((f, line, [call.rank for call in ended]) for (f, line), ended in same.items())
    return sorted(places, key=lambda g: (len(g[2]), g[0]))


def label(path: Path) -> str:
    """The rank of a trace: the number in `rank_12` or `12.calls`, else the file's stem (`trace-iam01-3-835990`)."""
    match = re.search(r"rank[_-]?(\d+)", path.name) or re.fullmatch(r"(\d+)\.\w+", path.name)
    return match[1] if match else path.stem


def _ring_call(path: Path, size: int) -> LastCall | None:
    # The ring buffer, or its dump as text below stacks/: neither is large.
    if size > LARGEST:
        return None
    with path.open("rb") as file:
        numbered = re.match(rb"\d{12} ", file.read(16)) is not None
    calls = read_calls(path) if numbered else path.read_text(encoding="utf-8", errors="replace").splitlines()
    entered = [m for m in map(RING_LINE.match, calls) if m]
    if not entered:
        return None
    function, last = next((m[2] for m in reversed(entered) if m[1] == ">"), ""), entered[-1]
    line = f"{'in' if last[1] == '>' else 'left'} {last[2]}"
    return LastCall(rank=label(path), function=function, line=line, bytes=size)


def _line(ran: re.Match[bytes] | None) -> str:
    if ran is None:
        return ""
    file, line, code = (part.decode("utf-8", "replace").strip() for part in ran.groups())
    return f"{file}:{line}  {code[:120]}"


def calls_text(calls: Collection[LastCall]) -> str:
    """Where the traces end, the rarest place first, for a terminal."""
    total = sum(call.bytes for call in calls) / 1e9
    lines = [f"{len(calls)} traces, {total:.2f} GB; where they end, the rarest first:"]
    for function, line, ranks in groups(calls):
        more = f", ... ({len(ranks)} in all)" if len(ranks) > SHOWN else ""
        lines += [f"{len(ranks):5d}  {function}  {line}", f"       {', '.join(ranks[:SHOWN])}{more}"]
    return "\n".join(lines)
