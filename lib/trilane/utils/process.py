"""Child processes: how they start, end with their parent even when it is killed, and keep a promised port."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
PARENT = "TRILANE_PARENT_PID"  # in the environment, because the parent may end before its child asks


def python(*arguments: str, program: str = sys.executable) -> list[str]:
    """The command `python ARGUMENTS`, by which every child of ours starts: subprocess.run(python("-m", "trilane"))."""
    # Python would put the current folder first in sys.path, and run a colleague's `json.py` there in place of its own.
    # The variable, unlike the option -P, is inherited: torchrun's workers are safe, too.
    return ["env", *(f"{name}={value}" for name, value in SAFE_PATH.items()), program, *arguments]


def announced() -> dict[str, str]:
    """The variable by which this process is the parent of die_with_parent()."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, where that has set announced()."""
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process signal `number` when its parent, of id `parent`, ends; on Linux.

    Where it has ended already, this process is killed at once.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG, <sys/prctl.h>
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def allow_open_files(most: int = 65_536) -> None:
    """Raise this process's limit of open files, and its children's, to `most` where the hard limit allows it."""
    # The first node keeps a connection to each rank and node of a run: with 1,024, a common limit, 128 nodes of 8 GPUs
    # cannot meet (torch's store then answers nobody any more).
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port of the loopback, for a child that listens there."""
    with socket.socket() as held:
        # A bound socket that does not listen: the kernel hands its port to nobody, and a server with SO_REUSEADDR, as
        # torch's store is, may take it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
