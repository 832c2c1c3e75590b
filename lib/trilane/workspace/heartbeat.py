"""Beat: the sign of life that each rank writes to ranks/<rank>.beat, and Pulse, who notices when one stops moving."""

import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECORD = 128  # bytes of a beat file: one padded line, overwritten in place


END = "end"  # the phase of a rank that has nothing left to do


# Until its second iteration a rank imports, builds samples, compiles: it may take so many times as long, and at
# least so many seconds.
START_FACTOR, START_S = 5.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank does: iteration `step` (0: not yet in the first), `phase`, since when (seconds since 1970), where."""

    rank: int
    step: int
    phase: str
    time: float
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} in iteration {self.step}, {self.phase or 'between phases'}"


def encode(step: int, phase: str, now: float, rest: bytes) -> bytes:
    """A record; `rest` is place(): what never changes."""
    return (b"%d %s %.3f " % (step, phase.encode() or b"-", now) + rest)[: RECORD - 1].ljust(RECORD - 1) + b"\n"


def place() -> bytes:
    """This process: its number and its host."""
    return f"{os.getpid()} {platform.node() or 'localhost'}".encode()


def read_beats(folder: Path) -> dict[int, Heartbeat]:
    """The last beat of each rank of a run folder, as far as they can be read."""
    return {beat.rank: beat for beat in _read(folder)}


def _read(folder: Path) -> Iterator[Heartbeat]:
    for path in sorted((folder / "ranks").glob("*.beat")):
        parts = path.read_text(encoding="utf-8", errors="replace").split()
        if len(parts) >= 5 and path.stem.isdigit():
            step, phase, when, pid, host = parts[:5]
            phase = "" if phase == "-" else phase
            yield Heartbeat(rank=int(path.stem), step=int(step), phase=phase, time=float(when), pid=int(pid), host=host)


def process_state(pid: int) -> str:
    """The kernel's letter for a process of this host ("R", "S", "D", "T" stopped, "Z" dead); "gone" where there is
    none, "" where the system (macOS) does not say."""
    if not Path("/proc/self").exists():
        return ""
    try:
        # The name in brackets may hold anything, brackets too.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


class StallDetector:
    """Notices when a rank of the run in `folder` has not moved for `timeout_s`; 0 looks at nothing.

    Clocks of hosts differ: what counts is when this process saw a beat change, by its own clock.
    """

    def __init__(self, folder: Path, ranks: int, timeout_s: float) -> None:
        self._folder, self._ranks, self.timeout_s = folder, ranks, timeout_s
        self._every = min(5.0, max(0.2, timeout_s / 20))
        self._start = max(START_FACTOR, START_S / timeout_s) if timeout_s else START_FACTOR
        self._begin = self._next = time.monotonic()
        self._seen: dict[int, tuple[Heartbeat, float]] = {}

    def stalled(self) -> str:
        """Why the run counts as stalled: the rank that stands still longest; "" where all move. Cheap to ask often."""
        now = time.monotonic()
        if self.timeout_s <= 0 or now < self._next:
            return ""
        self._next = now + self._every
        beats = read_beats(self._folder)
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        still = [(self._still(beat, now - since), str(beat)) for beat, since in self._seen.values()]
        absent = [r for r in range(self._ranks) if r not in beats]
        if absent:
            still.append(((now - self._begin) / self._start, f"rank {absent[0]} before its first sign of life"))
        longest, who = max(still, default=(0.0, ""))
        return f"no sign of life for {self.timeout_s:.0f} s: {who}" if longest > self.timeout_s else ""

    def _still(self, beat: Heartbeat, age_s: float) -> float:
        if beat.phase == END:
            return 0.0
        return age_s / (self._start if beat.step < 2 else 1.0)


# faulthandler writes the stacks when a rank gets this signal: no library and no scheduler uses it.
STACKS = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
