"""Who asks a worker to save, to stop, or to be gone, is told apart by the signal and by who sent it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from trilane.engine.signals import FORWARDED, SAVE, STOP
from trilane.launch.local import environment

WORKER = """
import time
from trilane.engine.signals import Signals
signals = Signals()
print("ready", flush=True)
while not (signals.save_s > 0 or signals.stop):
    time.sleep(0.01)
print("save" if signals.save_s > 0 else "stop")
"""


def answer(send: Callable[[int], None], env: Mapping[str, str], before: Callable[[], None] | None = None) -> str:
    """What a worker understands, or "gone"."""
    command = [sys.executable, "-c", WORKER]
    child = subprocess.Popen(
        command, env={**environment(1), **env}, stdout=subprocess.PIPE, text=True, preexec_fn=before
    )
    assert child.stdout is not None
    ready = child.stdout.readline()
    send(child.pid)
    out = child.stdout.read()
    child.wait()
    assert child.returncode in (0, 143) and ready == "ready\n"
    return out.strip() if child.returncode == 0 else "gone"


def by_parent(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def by_another(number: int) -> Callable[[int], None]:
    return lambda pid: subprocess.run(["/bin/kill", f"-{number}", str(pid)], check=True) and None


OURS = {FORWARDED: "1"}


@pytest.mark.parametrize(
    ("send", "env", "understood"),
    [
        (by_parent(SAVE), {}, "save"),
        (by_parent(SAVE), OURS, "save"),
        (by_parent(signal.SIGTERM), {}, "stop"),
        (by_parent(STOP), OURS, "stop"),
        (by_another(signal.SIGTERM), OURS, "stop"),
        (by_parent(signal.SIGTERM), OURS, "gone"),
    ],
    ids=["USR1", "USR1 passed on", "TERM of srun", "TERM passed on", "TERM of SLURM", "TERM of our torchrun"],
)
def test_a_worker_understands_who_asks_for_what(send: Callable, env: Mapping[str, str], understood: str) -> None:
    """torchrun sends SIGTERM to clear up after a dead rank; SLURM and a person send it to end a run."""
    assert answer(send, env) == understood


@pytest.mark.parametrize("how", ["blocked by our torchrun", "ignored by a job script"])
def test_a_signal_that_comes_while_a_worker_starts_kills_nobody(how: str) -> None:
    """Held back it is not even lost."""

    def early() -> None:
        if how.startswith("blocked"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE})
        else:
            signal.signal(SAVE, signal.SIG_IGN)
        os.kill(os.getpid(), SAVE)

    late = (lambda pid: None) if how.startswith("blocked") else by_parent(SAVE)
    assert answer(late, {}, early) == "save"
