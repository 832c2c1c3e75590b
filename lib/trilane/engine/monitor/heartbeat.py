"""The heartbeat of this process: its step and phase in ranks/<rank>.beat, read by the watchdog.

128 bytes of a mapped file are overwritten at each change of phase: no system call, and the content survives when the
rank is stopped or killed. Disabled where the plan's hang_timeout_s is 0.
"""

import ctypes
import faulthandler
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trilane.config.plan import Plan
from trilane.engine.monitor import call_trace, phases
from trilane.engine.monitor.call_trace import allocate
from trilane.workspace import flight_recorder
from trilane.workspace.heartbeat import END, RECORD, STACKS, encode, place

LAUNCHED = "TRILANE_RANK_LOGS"  # in the environment of ranks that launch.local watches
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # <sys/prctl.h>


_beats: list["Heartbeat"] = []


class Heartbeat:
    """Writes the heartbeat of one rank until closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        allocate(file, RECORD)
        self._map = mmap.mmap(file, RECORD)
        os.close(file)
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
    ranks.mkdir(exist_ok=True)
    _beats.append(Heartbeat(ranks / f"{rank}.beat"))
    if sys.platform.startswith("linux"):
        # Under Yama a process may trace only its descendants, and the launcher's py-spy is a sibling of this process.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    faulthandler.register(STACKS, file=(ranks / f"{rank}.stack").open("ab"), all_threads=True)
    for name, value in flight_recorder.environment(ranks, rank).items():
        os.environ.setdefault(name, value)
    if plan.run.trace_packages:
        call_trace.begin(ranks / f"{rank}.calls", plan.run.trace_packages.split(","), plan.run.trace_calls)
    if os.environ.get("LOCAL_RANK", "0") == "0" and LAUNCHED not in os.environ:
        ahead = ["ahead"] if rank == "0" else []
        command = [sys.executable, "-m", "trilane.launch.watchdog", str(folder), str(os.getpid()), *ahead]
        subprocess.Popen(command, stdin=subprocess.DEVNULL)


def at(step: int) -> None:
    """Record that this rank enters iteration `step`."""
    for heartbeat in _beats:
        heartbeat.at(step)


def end() -> None:
    """Record that this rank has finished."""
    for heartbeat in _beats:
        heartbeat.beat(END)
        flight_recorder.forget(heartbeat.path.parent, heartbeat.path.stem)
        heartbeat.close()
