"""Heartbeat: each rank's state in ranks/<rank>.beat, its last calls in ranks/<rank>.calls, and the StallDetector.

Both files are records of fixed size, overwritten in place: readable when the process is stuck, stopped or killed.
"""

import os
import platform
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

RECORD = 128  # bytes of a heartbeat file: one padded line
# What encode() writes. A process id is above 1: a signal to -1, 0 or 1 would reach other processes.
BEAT = re.compile(rb"(\d{1,12}) ([^\s\0]{1,64}) (\d{1,12}\.\d{3}) (?!1 )([1-9]\d{0,8}) ([^\s\0]+)\s*$")
END = "end"  # the phase of a rank that has finished

SLOT = 128  # bytes of a call in the ring buffer: number, time, `>` entered or `<` left, function; padded, with newline
CALL = re.compile(r"^(\d{12}) (\d+\.\d{6}) ([<>]) (.*?)\s*$")

# Until its second iteration a rank imports, builds samples and compiles: its timeout is longer by this factor, and at
# least this many seconds.
START_FACTOR, START_S = 5.0, 300.0

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


def read_beats(folder: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of each rank of a run folder, where readable."""
    found = {}
    for path in sorted((folder / "ranks").glob("*.beat")):
        match = BEAT.match(path.read_bytes()[:RECORD]) if path.is_file() else None
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


class StallDetector:
    """Detects when a rank of the run in `folder` has made no progress for `timeout_s`; 0 disables it.

    Clocks of hosts differ: what counts is when this process saw a heartbeat change, by its own clock.
    """

    def __init__(self, folder: Path, ranks: int, timeout_s: float) -> None:
        self._folder, self._ranks, self.timeout_s = folder, ranks, timeout_s
        self._every = min(5.0, max(0.2, timeout_s / 20))
        self._start = max(START_FACTOR, START_S / timeout_s) if timeout_s else START_FACTOR
        self._begin = self._next = time.monotonic()
        self._seen: dict[int, tuple[Heartbeat, float]] = {}

    def stalled(self) -> str:
        """Why the run counts as stalled: the rank longest without progress; "" where all progress. Cheap to call."""
        now = time.monotonic()
        if self.timeout_s <= 0 or now < self._next:
            return ""
        self._next = now + self._every
        beats = read_beats(self._folder)
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        running = [(beat, now - since) for beat, since in self._seen.values() if beat.phase != END]
        still = [(age_s / (self._start if beat.step < 2 else 1.0), str(beat)) for beat, age_s in running]
        absent = [r for r in range(self._ranks) if r not in beats]
        if absent:
            still.append(((now - self._begin) / self._start, f"rank {absent[0]} before its first heartbeat"))
        longest, who = max(still, default=(0.0, ""))
        return f"no progress for {self.timeout_s:.0f} s: {who}" if longest > self.timeout_s else ""


def read_calls(path: Path) -> list[str]:
    """The calls in a ring buffer, oldest first: time, `>` entered or `<` left, function; half-written ones left out."""
    data = path.read_bytes()
    slots = (data[i : i + SLOT].decode("utf-8", "replace").rstrip("\n") for i in range(0, len(data), SLOT))
    found = [match for slot in slots if (match := CALL.match(slot))]
    return [f"{m[2]} {m[3]} {m[4]}" for m in sorted(found, key=lambda m: int(m[1]))]
