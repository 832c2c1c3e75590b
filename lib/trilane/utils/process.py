"""Child processes: how they start, end with their parent even when it is killed, and keep a promised port."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
PARENT = "TRILANE_PARENT_PID"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
OPEN_FILES = 65_536


def python(*arguments: str, program: str = sys.executable) -> list[str]:
    """The command `python ARGUMENTS`, by which every child of ours starts: subprocess.run(python("-m", "trilane")).

    Python would put the current folder first in sys.path, and run a colleague's `json.py` there in place of its own.
    The variable, unlike the option -P, is inherited: torchrun's workers are safe, too.
    """
    return ["env", *(f"{name}={value}" for name, value in SAFE_PATH.items()), program, *arguments]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only; without effect unless announce() was used.

    The parent's id comes through the environment, because the parent may end before this call.
    """
    expected = os.environ.get(PARENT)
    if expected is not None:
        die_with(int(expected))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process signal `number` when its parent, of id `parent`, ends; where it has ended
    already, this process is killed at once."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_open_files(most: int = OPEN_FILES) -> None:
    """Raise this process's limit of open files, and that of its children, to `most` where the hard limit allows it.

    The first node keeps a connection to each rank and node of a run: with 1,024, a common limit, 128 nodes of 8 GPUs
    cannot meet (torch's store then answers nobody any more).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def environment_set(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables inside the block; afterwards what they were before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def announce(environment: dict[str, str]) -> dict[str, str]:
    """`environment` with this process as the parent of die_with_parent()."""
    return {**environment, PARENT: str(os.getpid())}


@contextlib.contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """`port` of the loopback, or a free one where it is 0, for a child that listens there inside the block.

    Until then nobody else is given it: the socket that is bound here does not listen, so a server with SO_REUSEADDR, as
    torch's store is, may take it, while the kernel hands it to no other process. ValueError where the port is in use.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"port={port}: cannot be used here ({error})") from None
        yield int(held.getsockname()[1])
