"""Child processes: how every one starts, ends with its parent even when that is killed, and keeps a
promised port.
"""

import contextlib
import ctypes
import multiprocessing
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn, TypeAlias

Child = subprocess.Popen[bytes]
Lines: TypeAlias = "queue.SimpleQueue[str]"
# in the environment, because the parent may end before its child asks
PARENT = "TRILANE_PARENT_PID"


def python(*arguments: str, program: str = sys.executable) -> list[str]:
    """The command `python ARGUMENTS`, also for srun: run(python("-m", "trilane",
    "--version")).stdout.

    Where it would run an engine here, ValueError if torch, of the extra `train`, is missing.
    """
    module = arguments[1] if len(arguments) > 1 else ""
    is_engine = module.startswith("trilane_engine") and program == sys.executable
    if is_engine and find_spec("torch") is None:
        raise ValueError(f"torch=missing: is installed by {install_command('train')}")
    # Without -P Python puts the current folder first in sys.path, and runs a colleague's `json.py`
    # in place of its own.
    return [program, "-P", *arguments]


def install_command(extra: str) -> str:
    """The command that installs this trilane, which no index has, with an extra."""
    return f"pip install -e '.[{extra}]' in a clone of the repository"


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every child: this process's with these changes, and safe in whatever
    folder it starts.

    Left out: a folder that is searched by its absolute path, which the user chose.
    """
    values = dict(os.environ)
    values.update(changes or {})
    values["PYTHONSAFEPATH"] = "1"  # as -P, also for the workers that a child starts
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        # An empty entry, as PYTHONPATH=$PYTHONPATH:/x leaves it, and a relative one are searched in
        # the current folder.
        folders = values.pop(name, "").split(os.pathsep)
        absolute = [folder for folder in folders if os.path.isabs(folder)]
        if absolute:
            values[name] = os.pathsep.join(absolute)
    # A socket's path has at most 107 bytes (man 7 unix); multiprocessing, torch and Jupyter add up
    # to 34 to TMPDIR.
    if len(os.fsencode(values.get("TMPDIR", ""))) > 70:
        values["TMPDIR"] = "/tmp"  # in which each makes a folder that its user alone may use
    return values


def adopt_environment() -> None:
    """Give this process, and what libraries start from it, the environment of a child of ours."""
    safe = environment()
    os.environ.clear()
    os.environ.update(safe)


def start(command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Child:
    """The command as a child that runs; `env` are changes of its environment. It reads no terminal,
    unless told so.
    """
    return subprocess.Popen(
        command, env=environment(env), **{"stdin": subprocess.DEVNULL, **options}
    )


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    within_s: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """The command's output, once it has ended; its returncode is 124 where it took too long, 127
    where it cannot start, as of timeout(1) and a shell, with the reason in stderr.
    """
    options |= {
        "capture_output": True,
        "encoding": "utf-8",
        "errors": "replace",
        "stdin": subprocess.DEVNULL,
    }
    try:
        return subprocess.run(
            command, env=environment(env), timeout=within_s, check=False, **options
        )
    except subprocess.TimeoutExpired:
        code = 124
        reason = f"timed out: nothing within {within_s:g} s"
    except OSError as error:
        code = 127
        reason = str(error.strerror)
    return subprocess.CompletedProcess(command, code, "", f"{command[0]}: {reason}")


def replace_by(command: Sequence[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """Run the command in place of this process."""
    sys.stdout.flush()
    os.execvpe(command[0], [*command], environment(env))


def context(method: str) -> Any:
    """multiprocessing's context of that start method."""
    adopt_environment()
    return multiprocessing.get_context(method)


def interrupt(child: Child) -> None:
    """Interrupt the leader of a process group and wait; after eight seconds kill the group."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(8.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def printed_lines(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Lines]:
    """The lines that a child prints; an empty one is its end.

    It ends with its input, which is open as long as the block; 5 s later by SIGTERM.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child: Any = start(command, env, text=True, errors="replace", bufsize=1, **pipes)
    lines: Lines = queue.SimpleQueue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        yield lines
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            child.stdin.close()
            child.wait(5.0)
        child.terminate()


def announced() -> dict[str, str]:
    """The variable by which this process is the parent of die_with_parent()."""
    return {PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, where that has set announced()."""
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process signal `number` when its parent, of id `parent`, ends; on
    Linux.

    Where it has ended already, this process is killed at once.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, number)  # PR_SET_PDEATHSIG, <sys/prctl.h>
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def allow_open_files() -> None:
    """Raise this process's limit of open files, and its children's, to 65,536 where the hard limit
    allows it.
    """
    # The first node keeps a connection to each rank and node of a run: with 1,024, a common limit,
    # 128 nodes of 8 GPUs cannot meet (torch's store then answers nobody any more).
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1: a hard limit without end, as on macOS, leaves the soft one as it is
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(65_536, hard)), hard))


def core_numbers() -> set[int]:
    """The CPU cores that this process may use; counted from 0 where the system does not report
    them.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A free port of the loopback, for a child that listens there."""
    with socket.socket() as held:
        # A bound socket that does not listen: the kernel hands its port to nobody, and a server
        # with SO_REUSEADDR, as torch's store is, may take it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
