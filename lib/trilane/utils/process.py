"""No orphans: a process that ends with the one that started it, even when that one is killed."""

import ctypes
import os
import signal
import sys

PARENT = "TRILANE_PARENT_PID"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends. Linux only; nothing happens where nobody announced himself.

    The parent announces itself in the environment (announce()), because it may have ended before we asked the kernel.
    """
    expected = os.environ.get(PARENT)
    if expected is not None:
        die_with(int(expected))


def die_with(parent: int) -> None:
    """SIGKILL for this process when `parent`, which started it, ends; at once where it has ended already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def announce(environment: dict[str, str]) -> dict[str, str]:
    """`environment` with this process named as the parent to die with."""
    return {**environment, PARENT: str(os.getpid())}
