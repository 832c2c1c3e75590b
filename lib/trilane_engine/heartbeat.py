"""What this process leaves for the watchdog: its heartbeat, with iteration and phase, in memory of
its node.

The record is memory-mapped and overwritten at each change of phase: no system call, and the content
stays when the rank hangs in C, is stopped or is killed. Nothing where the plan's hang_timeout_s is
0.
"""

import ctypes
import faulthandler
import mmap
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trilane.config.plan import Plan
from trilane.utils.process import python, start
from trilane.workspace import flight_recorder
from trilane.workspace.heartbeat import END, STACKS, create_record, encode, place
from trilane_engine import phases
from trilane_engine.pace import PaceMeter

_beats: list["Heartbeat"] = []  # of this process, at most one


class Heartbeat:
    """Writes the heartbeat of one rank, at each change of phase."""

    def __init__(self, record: mmap.mmap) -> None:
        self._record = record
        self.step = 0
        self.process = place()
        self.meter = PaceMeter()
        self.beat(phases.current())
        phases.subscribe(self.beat)

    def beat(self, phase: str) -> None:
        """Write `phase` and the time."""
        self._record[:] = encode(self.step, phase, time.time(), self.process)


def begin(plan: Plan, folder: Path) -> None:
    """Start this rank's heartbeat, let py-spy attach, and dump stacks on a signal; on each node
    start the watchdog.
    """
    if plan.run.hang_timeout_s <= 0:
        return
    rank = os.environ["RANK"]
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    _beats.append(Heartbeat(create_record(folder, os.environ, int(rank))))
    if sys.platform.startswith("linux"):
        # PR_SET_PTRACER, PR_SET_PTRACER_ANY of <sys/prctl.h>: under Yama a process may trace only
        # its descendants, and the launcher's py-spy is a sibling of this process.
        ctypes.CDLL(None, use_errno=True).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    faulthandler.register(STACKS, file=(ranks / f"{rank}.stack").open("ab"), all_threads=True)
    for name, value in flight_recorder.environment(ranks, rank).items():
        os.environ.setdefault(name, value)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first and "TRILANE_RANK_LOGS" not in os.environ:  # else launch.local watches the ranks
        start(python("-m", "trilane_diagnose.watchdog", str(folder), str(os.getpid()), rank))


def at(step: int) -> None:
    """Record that this rank enters iteration `step`."""
    for heartbeat in _beats:
        heartbeat.step = step
        heartbeat.beat(phases.current())


def iterated(samples: int, seconds: float, by_phase: Mapping[str, float]) -> None:
    """Record the pace after an iteration of so many samples, with this rank's seconds by phase."""
    for heartbeat in _beats:
        pace = heartbeat.meter.add(samples, seconds, by_phase)
        heartbeat.process = {**place(), "pace": vars(pace)}
        heartbeat.beat(phases.current())


def end(folder: Path) -> None:
    """Record that this rank has finished."""
    for heartbeat in _beats:
        heartbeat.beat(END)
        flight_recorder.forget(folder / "ranks", os.environ["RANK"])
