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

# in the environment of workers: their parent is our torchrun
FORWARDED = "TRILANE_FORWARDS_SIGNALS"
SAVE = signal.SIGUSR1
STOP = signal.SIGUSR2
ALL = {SAVE, STOP, signal.SIGTERM}


class Signals:
    """Listens in a thread, since the main one may wait in a collective; create it before any other
    thread.
    """

    def __init__(self) -> None:
        self.save_s = -math.inf  # when the last SAVE came, by the monotonic clock
        self.stop = False
        # Python's own handler would wait for the collective to return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
        for number in ALL:  # a job script may ignore them to keep torchrun alive
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        launcher = os.getppid() if FORWARDED in os.environ else None
        while True:
            number, sender = _next_signal()
            if number == SAVE:
                self.save_s = time.monotonic()
            elif number == signal.SIGTERM and sender == launcher:
                os._exit(128 + signal.SIGTERM)
            else:
                self.stop = True


def _next_signal() -> tuple[int, int]:
    """The next of the blocked signals and its sender's process id, 0 where the system (macOS) hides
    it.
    """
    if hasattr(signal, "sigwaitinfo"):
        received = signal.sigwaitinfo(ALL)
        return received.si_signo, received.si_pid
    return signal.sigwait(ALL), 0
