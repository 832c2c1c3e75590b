"""Signals received by this process, kept until the loop checks them; without torch.

SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end. SLURM sends both to the tasks
of a step, and where it does not track processes by cgroup to their children too; our torchrun
forwards them as SAVE and STOP. torchrun itself sends SIGTERM to clean up after a dead rank: from
our torchrun that ends the process at once.
"""

import math
import os
import signal
import threading
import time

FORWARDED = (
    "TRILANE_FORWARDS_SIGNALS"  # in the environment of workers: their parent is our torchrun
)
SAVE, STOP = signal.SIGUSR1, signal.SIGUSR2
ALL = {SAVE, STOP, signal.SIGTERM}


class Signals:
    """Listens in a thread, since the main one may wait in a collective; create it before any other
    thread.
    """

    def __init__(self) -> None:
        self.save_s, self.stop = (
            -math.inf,
            False,
        )  # when the last SAVE came, by the monotonic clock; whether to end
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # Python's own handler would wait for the collective to return
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
        for number in ALL:  # a job script may ignore them to keep torchrun alive
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        launched, parent = FORWARDED in os.environ, os.getppid()
        while True:
            number, sender = _next_signal()
            if number == SAVE:
                self.save_s = time.monotonic()
            elif launched and number == signal.SIGTERM and sender == parent:
                os._exit(128 + signal.SIGTERM)
            else:
                self.stop = True


def _next_signal() -> tuple[int, int]:
    """The next of the blocked signals and its sender's process id, 0 where the system (macOS) hides
    it.
    """
    if hasattr(signal, "sigwaitinfo"):
        found = signal.sigwaitinfo(ALL)
        return found.si_signo, found.si_pid
    return signal.sigwait(ALL), 0
