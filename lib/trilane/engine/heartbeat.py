"""What this process leaves for the watchdog: its heartbeat, with iteration and phase, in <rank>.beat on its node.

The file is memory-mapped and its 128 bytes overwritten at each change of phase: no system call, and the content stays
when the rank hangs in C, is stopped or is killed. Nothing where the plan's hang_timeout_s is 0.
"""

import ctypes
import errno
import faulthandler
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trilane.config.plan import Plan
from trilane.engine import phases
from trilane.utils.process import python
from trilane.workspace import flight_recorder
from trilane.workspace.heartbeat import END, RECORD, STACKS, encode, enter, place, sweep

_beats: list["Heartbeat"] = []


class Heartbeat:
    """Writes the heartbeat of one rank until closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("w+b", buffering=0) as file:
                # Not a sparse file: the kernel ends a process (SIGBUS) that writes to a mapped page of a full disk.
                if file.write(b"\0" * RECORD) < RECORD:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._map = mmap.mmap(file.fileno(), RECORD)
        except OSError:
            path.unlink(missing_ok=True)  # half a heartbeat would count as a rank that stands still
            raise
        self._step, self._rest = 0, place()
        self.beat(phases.current())
        self.close: Callable[[], None] = phases.subscribe(self.beat)

    def beat(self, phase: str) -> None:
        """Write `phase` and the time."""
        self._map[:] = encode(self._step, phase, time.time(), self._rest)

    def at(self, step: int) -> None:
        """Write iteration `step`."""
        self._step = step
        self.beat(phases.current())


def begin(plan: Plan, folder: Path) -> None:
    """Start this rank's heartbeat, let py-spy attach, and dump stacks on a signal; on each node start the watchdog."""
    if plan.run.hang_timeout_s <= 0:
        return
    rank, ranks = os.environ["RANK"], folder / "ranks"
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    ranks.mkdir(exist_ok=True)
    path, notes = enter(folder, os.environ, lambda place: _beats.append(Heartbeat(place / f"{rank}.beat")))
    if is_first:
        sweep()
        if notes:
            print(f"trilane: the heartbeats of {platform.node()} lie in {path.parent}: {notes}", flush=True)
    if sys.platform.startswith("linux"):
        # PR_SET_PTRACER, PR_SET_PTRACER_ANY of <sys/prctl.h>: under Yama a process may trace only its descendants, and
        # the launcher's py-spy is a sibling of this process.
        ctypes.CDLL(None, use_errno=True).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    faulthandler.register(STACKS, file=(ranks / f"{rank}.stack").open("ab"), all_threads=True)
    for name, value in flight_recorder.environment(ranks, rank).items():
        os.environ.setdefault(name, value)
    if is_first and "TRILANE_RANK_LOGS" not in os.environ:  # else launch.local watches the ranks
        command = python("-m", "trilane.launch.watchdog", str(folder), str(os.getpid()), rank)
        subprocess.Popen(command, stdin=subprocess.DEVNULL)


def at(step: int) -> None:
    """Record that this rank enters iteration `step`."""
    for heartbeat in _beats:
        heartbeat.at(step)


def end(folder: Path) -> None:
    """Record that this rank has finished."""
    for heartbeat in _beats:
        heartbeat.beat(END)
        flight_recorder.forget(folder / "ranks", heartbeat.path.stem)
        heartbeat.close()
