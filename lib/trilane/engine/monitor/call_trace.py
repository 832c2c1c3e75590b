"""A call trace of bounded size: the last calls into chosen packages, in a ring buffer in a file.

The file is memory-mapped: its content survives when the rank hangs in C, is stopped or is killed.
"""

import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trilane.workspace.heartbeat import SLOT

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
        allocate(file, calls * SLOT)
        self._map, self._calls, self._number = mmap.mmap(file, calls * SLOT), calls, 0
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


def begin(path: Path, packages: Sequence[str], calls: int) -> None:
    """Start tracing this process's main thread."""
    ring = Ring(path, packages, calls)
    if hasattr(sys, "monitoring"):
        ring.monitor()
    else:
        sys.setprofile(ring.profile)
