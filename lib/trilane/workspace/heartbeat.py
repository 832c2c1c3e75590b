"""Heartbeat: each rank's state in <rank>.beat, its last calls in <rank>.calls, on its node; the nodes' reports of them.

Both files are records of fixed size, overwritten in place: readable when the process is stuck, stopped or killed. They
lie in the node's own folder (node_folder.py); the run folder gets a line of each node from time to time.
"""

import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.files import json_object
from trilane.workspace import node_folder

RECORD = 128  # bytes of a heartbeat file: one padded line
# What encode() writes. A process id is above 1: a signal to -1, 0 or 1 would reach other processes.
BEAT = re.compile(rb"(\d{1,12}) ([^\s\0]{1,64}) (\d{1,12}\.\d{3}) (?!1 )([1-9]\d{0,8}) ([^\s\0]+)\s*$")
END = "end"  # the phase of a rank that has finished

SLOT = 128  # bytes of a call in the ring buffer: number, time, `>` entered or `<` left, function; padded, with newline
CALL = re.compile(r"^(\d{12}) (\d+\.\d{6}) ([<>]) (.*?)\s*$")

MOST = 1 << 40  # a larger number in a report is a damaged one

# The signal on which faulthandler writes the stacks: no library and no scheduler uses it.
STACKS = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's state: iteration `step` (0: before the first), `phase`, since `time` (Unix, s), process, host."""

    rank: int
    step: int
    phase: str
    time: float
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} in iteration {self.step}, {self.phase or 'between phases'}"


def encode(step: int, phase: str, now: float, rest: bytes) -> bytes:
    """The record of a heartbeat; `rest` is the constant part, place()."""
    return (b"%d %s %.3f " % (step, phase.encode() or b"-", now) + rest)[: RECORD - 1].ljust(RECORD - 1) + b"\n"


def place() -> bytes:
    """This process: its pid and its host."""
    return f"{os.getpid()} {platform.node() or 'localhost'}".encode()


def beats_in(place: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of each rank that keeps its own in the folder `place`, where readable."""
    found = {}
    for path in sorted(place.glob("*.beat")):
        data = b""
        with contextlib.suppress(OSError):
            data = path.read_bytes()[:RECORD]
        match = BEAT.match(data)
        if match and path.stem.isdecimal():
            step, phase, when, pid, host = match.groups()
            found[int(path.stem)] = Heartbeat(
                rank=int(path.stem),
                step=int(step),
                phase="" if phase == b"-" else phase.decode("utf-8", "replace"),
                time=float(when),
                pid=int(pid),
                host=host.decode("utf-8", "replace"),
            )
    return found


def read_beats(folder: Path) -> dict[int, Heartbeat]:
    """The last known heartbeat of each rank of a run folder: of ranks of this machine now, of others as last reported.

    Where no node has reported, as in run folders of earlier versions: what ranks/*.beat hold.
    """
    reported = [progress.beat for report in read_reports(folder) for progress in report.ranks]
    found = {beat.rank: beat for beat in reported} if reported else beats_in(folder / "ranks")
    for place in node_folder.find(folder):
        found |= beats_in(place)
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A rank's heartbeat, the seconds without a change by the clock of its node, and whether its process has exited."""

    beat: Heartbeat
    idle_s: float
    has_exited: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node's watchdog reports about all its ranks, every REPORT_S: ranks/nodes/<its first rank>.json, one line.

    `number` rises with each report: a reader needs no clock to see that the node is alive. `start` names the start of
    the run (node_folder.start_id), so that what an earlier one left is not taken for news.
    """

    first: int
    host: str
    start: str
    number: int
    ranks: tuple[Progress, ...]

    def write(self, folder: Path) -> None:
        """Replace the node's report: one open and one rename, nothing forced to the disk. OSError where it is full."""
        path = folder / node_folder.NODES / f"{self.first}.json"
        rows = [
            [
                p.beat.rank,
                p.beat.step,
                p.beat.phase,
                round(p.beat.time, 3),
                p.beat.pid,
                round(p.idle_s, 1),
                p.has_exited,
            ]
            for p in self.ranks
        ]
        facts = {"first": self.first, "host": self.host, "start": self.start, "number": self.number}
        aside = path.with_name(f".{path.name}")
        aside.write_text(json.dumps({**facts, "ranks": rows}, separators=(",", ":")) + "\n", encoding="utf-8")
        aside.replace(path)


def report_paths(folder: Path) -> list[Path]:
    """The reports of the nodes of a run folder."""
    return list((folder / node_folder.NODES).glob("[0-9]*.json"))


def read_report(path: Path) -> NodeReport | None:
    """A node's last report; None where it is damaged or missing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _report(path.read_text(encoding="utf-8"))
    return None


def read_reports(folder: Path) -> list[NodeReport]:
    """The last report of each node of a run folder, by first rank; damaged ones are left out."""
    found = (read_report(path) for path in report_paths(folder))
    return sorted((report for report in found if report), key=lambda report: report.first)


def forget_reports(folder: Path, start: str) -> None:
    """Remove the reports of other starts of the run: of nodes that it may no longer have."""
    for report in read_reports(folder):
        if report.start != start:
            (folder / node_folder.NODES / f"{report.first}.json").unlink(missing_ok=True)


def _report(text: str) -> NodeReport | None:
    """The report in a text; None for any other text."""
    values = json_object(text) or {}
    try:
        host, start = values["host"], values["start"]
        first, number = _whole(values["first"]), _whole(values["number"])
        rows = [(_whole(r), _whole(s), f, float(t), _whole(p), float(i), x) for r, s, f, t, p, i, x in values["ranks"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    texts = all(isinstance(text, str) and len(text) <= 255 for text in (host, start, *(row[2] for row in rows)))
    if not texts or not all(math.isfinite(row[3]) and 0 <= row[5] < math.inf for row in rows):
        return None
    ranks = tuple(
        Progress(
            beat=Heartbeat(rank=rank, step=step, phase=phase, time=when, pid=pid, host=host),
            idle_s=idle_s,
            has_exited=has_exited is True,
        )
        for rank, step, phase, when, pid, idle_s, has_exited in rows
    )
    return NodeReport(first=first, host=host, start=start, number=number, ranks=ranks)


def _whole(value: object) -> int:
    """A number of a report; ValueError for what is none."""
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError(value)
    return value


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this host ("R", "S", "D", "T" stopped, "Z" dead); "gone" where there is
    none, "" on systems without /proc (macOS)."""
    if not Path("/proc/self").exists():
        return ""
    try:
        # The name in parentheses may itself hold parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def keep_rings(places: Iterable[Path], folder: Path, rank: str = "*") -> None:
    """Copy the ranks' ring buffers from their node to ranks/ of the run folder; not where the disk is full."""
    for ring in (ring for place in places for ring in place.glob(f"{rank}.calls")):
        with contextlib.suppress(OSError, shutil.SameFileError):
            shutil.copyfile(ring, folder / "ranks" / ring.name)


def read_calls(path: Path) -> list[str]:
    """The calls in a ring buffer, oldest first: time, `>` entered or `<` left, function; half-written ones left out."""
    data = path.read_bytes()
    slots = (data[i : i + SLOT].decode("utf-8", "replace").rstrip("\n") for i in range(0, len(data), SLOT))
    found = [match for slot in slots if (match := CALL.match(slot))]
    return [f"{m[2]} {m[3]} {m[4]}" for m in sorted(found, key=lambda m: int(m[1]))]
