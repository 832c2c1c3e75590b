"""The heartbeat of this process: its step and phase in ranks/<rank>.beat, for the watchdog outside.

128 bytes of a mapped file are overwritten at each change of phase: no system call, and what a rank wrote is there even
when it is stopped or killed. Nothing happens where the plan's hang_timeout_s is 0.
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
from trilane.workspace import flight_recorder
from trilane.workspace.heartbeat import END, RECORD, STACKS, encode, place

LAUNCHED = "TRILANE_RANK_LOGS"  # in the environment of ranks that a launcher of ours watches


PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # <sys/prctl.h>


_beats: list["Heartbeat"] = []


class Heartbeat:
    """Writes the beat of one rank until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(file, RECORD)
        self._map = mmap.mmap(file, RECORD)
        os.close(file)
        self._step, self._rest = 0, place()
        self.beat(phases.now())
        self.close: Callable[[], None] = phases.listen(self.beat)

    def beat(self, phase: str) -> None:
        """The phase from now on."""
        self._map[:] = encode(self._step, phase, time.time(), self._rest)

    def at(self, step: int) -> None:
        """The iteration from now on."""
        self._step = step
        self.beat(phases.now())


def begin(plan: Plan, folder: Path) -> None:
    """From now on this rank gives signs of life, lets py-spy attach, and writes its stacks when asked by a signal."""
    if plan.run.hang_timeout_s <= 0:
        return
    rank, ranks = os.environ["RANK"], folder / "ranks"
    ranks.mkdir(exist_ok=True)
    _beats.append(Heartbeat(ranks / f"{rank}.beat"))
    if sys.platform.startswith("linux"):
        # Where Yama guards ptrace, py-spy may attach to its own children only; the launcher's py-spy is our sister.
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
    """This rank is in iteration `step` from now on."""
    for heartbeat in _beats:
        heartbeat.at(step)


def end() -> None:
    """This rank has nothing left to do."""
    for heartbeat in _beats:
        heartbeat.beat(END)
        flight_recorder.forget(heartbeat.path.parent, heartbeat.path.stem)
        heartbeat.close()
