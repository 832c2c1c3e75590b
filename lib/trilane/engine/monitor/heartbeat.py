"""What this process leaves for the watchdog: its heartbeat, its step and phase in <rank>.beat; and where the plan asks
for it a call trace, its last calls into chosen packages in <rank>.calls.

Both files lie on the node (workspace/node_folder.py), are memory-mapped and overwritten in place, the heartbeat's 128
bytes at each change of phase: no system call, and the content survives when the rank hangs in C, is stopped or is
killed. Disabled where the plan's hang_timeout_s is 0.
"""

import ctypes
import errno
import faulthandler
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trilane.config.plan import Plan
from trilane.engine.monitor import phases
from trilane.utils.process import python
from trilane.workspace import flight_recorder, node_folder
from trilane.workspace.heartbeat import END, RECORD, SLOT, STACKS, encode, keep_rings, place

LAUNCHED = "TRILANE_RANK_LOGS"  # in the environment of ranks that launch.local watches
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # <sys/prctl.h>

TOOL = 4  # sys.monitoring's number of this tool: debuggers, coverage and profilers have 0, 1 and 2


def allocate(file: int, size: int) -> None:
    """Give the open file `size` bytes on the disk; OSError where that is full.

    Not a sparse file: the kernel ends a process (SIGBUS) that writes to a mapped page where the disk is full.
    """
    os.ftruncate(file, size)
    if os.pwrite(file, b"\0" * size, 0) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Ring:
    """Writes calls of the functions in `packages` ("megatron.core", "trilane") to the last `calls` slots of a file."""

    def __init__(self, path: Path, packages: Sequence[str], calls: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            allocate(file, calls * SLOT)
            self._map, self._calls, self._number = mmap.mmap(file, calls * SLOT), calls, 0
        finally:
            os.close(file)
        self._inside = [os.sep + name.strip().replace(".", os.sep) for name in packages if name.strip()]
        self._names: dict[CodeType, bytes] = {}

    def name(self, code: CodeType) -> bytes:
        """The function's entry in the trace; b"" where it belongs to no chosen package."""
        found = self._names.get(code)
        if found is None:
            path = code.co_filename
            traced = any(f"{inside}{os.sep}" in path or path.endswith(f"{inside}.py") for inside in self._inside)
            where = "/".join(path.split(os.sep)[-3:])
            found = f" {code.co_qualname} ({where}:{code.co_firstlineno})".encode() if traced else b""
            self._names[code] = found
        return found

    def write(self, sign: bytes, name: bytes) -> None:
        """Add one call in place of the oldest."""
        text = b"%012d %.6f %s" % (self._number, time.time(), sign) + name
        start = self._number % self._calls * SLOT
        self._map[start : start + SLOT] = text[: SLOT - 1].ljust(SLOT - 1) + b"\n"
        self._number += 1

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """For sys.setprofile (Python 3.11)."""
        if event in ("call", "return"):
            name = self.name(frame.f_code)
            if name:
                self.write(b">" if event == "call" else b"<", name)

    def monitor(self) -> None:
        """For sys.monitoring (Python 3.12), which reports a function of no chosen package only once."""
        tools = sys.monitoring  # type: ignore[attr-defined]
        events = tools.events
        tools.use_tool_id(TOOL, "trilane")

        def callback_for(sign: bytes) -> Any:
            def callback(code: CodeType, *_: Any) -> Any:
                name = self.name(code)
                if not name:
                    return tools.DISABLE
                if threading.current_thread() is threading.main_thread():
                    self.write(sign, name)
                return None

            return callback

        tools.register_callback(TOOL, events.PY_START, callback_for(b">"))
        tools.register_callback(TOOL, events.PY_RETURN, callback_for(b"<"))
        tools.set_events(TOOL, events.PY_START | events.PY_RETURN)


def trace(path: Path, packages: Sequence[str], calls: int) -> None:
    """Start tracing this process's main thread."""
    ring = Ring(path, packages, calls)
    if hasattr(sys, "monitoring"):
        ring.monitor()
    else:
        sys.setprofile(ring.profile)


class Heartbeat:
    """Writes the heartbeat of one rank until closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            allocate(file, RECORD)
            self._map = mmap.mmap(file, RECORD)
        except OSError:
            path.unlink()  # half a heartbeat would count as a rank that stands still
            raise
        finally:
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


_beats: list[Heartbeat] = []


def begin(plan: Plan, folder: Path) -> None:
    """Start this rank's heartbeat, let py-spy attach, and dump stacks on a signal; on each node start the watchdog."""
    if plan.run.hang_timeout_s <= 0:
        return
    rank, ranks = os.environ["RANK"], folder / "ranks"
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    ranks.mkdir(exist_ok=True)
    node = node_folder.enter(folder, os.environ, lambda place: _write_in(place, rank, plan))
    if is_first:
        node_folder.sweep()
    if is_first and node.notes:
        print(f"trilane: the heartbeats of {platform.node()} lie in {node.path.parent}: {node.notes}", flush=True)
    if sys.platform.startswith("linux"):
        # Under Yama a process may trace only its descendants, and the launcher's py-spy is a sibling of this process.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    faulthandler.register(STACKS, file=(ranks / f"{rank}.stack").open("ab"), all_threads=True)
    for name, value in flight_recorder.environment(ranks, rank).items():
        os.environ.setdefault(name, value)
    if is_first and LAUNCHED not in os.environ:
        command = python("-m", "trilane.launch.watchdog", str(folder), str(os.getpid()), rank)
        subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _write_in(place: Path, rank: str, plan: Plan) -> None:
    """Start this rank's files in a folder; OSError, and nothing left there, where they do not fit."""
    heartbeat = Heartbeat(place / f"{rank}.beat")
    try:
        if plan.run.trace_packages:
            trace(place / f"{rank}.calls", plan.run.trace_packages.split(","), plan.run.trace_calls)
    except OSError:
        heartbeat.close()
        heartbeat.path.unlink()
        heartbeat.path.with_suffix(".calls").unlink(missing_ok=True)
        raise
    _beats.append(heartbeat)


def at(step: int) -> None:
    """Record that this rank enters iteration `step`."""
    for heartbeat in _beats:
        heartbeat.at(step)


def end(folder: Path) -> None:
    """Record that this rank has finished; its call trace moves to the run folder."""
    for heartbeat in _beats:
        heartbeat.beat(END)
        flight_recorder.forget(folder / "ranks", heartbeat.path.stem)
        keep_rings([heartbeat.path.parent], folder, heartbeat.path.stem)
        heartbeat.close()
