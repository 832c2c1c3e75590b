"""Signals: what this process was asked by the system, kept until the loop looks.

SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end. SLURM sends both to the tasks of a step, and where
it does not track processes by cgroup to their children too; our torchrun passes them on as SAVE and STOP. torchrun
itself also sends SIGTERM, to clear up after a dead rank: where it is ours, what it sends as SIGTERM means just that,
and the process ends at once.
"""

import os
import signal
import threading

FORWARDED = "TRILANE_FORWARDS_SIGNALS"  # in the environment of workers: their parent is our torchrun
SAVE, STOP = signal.SIGUSR1, signal.SIGUSR2
ALL = {SAVE, STOP, signal.SIGTERM}
# Any other torchrun kills its workers 30 s after the SIGTERM that it sends them for whatever reason. Who hangs on a
# dead peer by then must not take as long as that.
PATIENCE_S = 25.0


class Signals:
    """Listens from the moment it is made, before there are other threads; what came before then has waited.

    A thread takes the signals: the main one may be inside a collective operation, waiting for a peer that is gone.
    """

    def __init__(self) -> None:
        self.save = self.stop = False
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own answer waits for such an operation to return
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
        for number in ALL:  # a job script may have had them ignored, so that torchrun does not die of them
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        launched, parent = FORWARDED in os.environ, os.getppid()
        while True:
            number, sender = wait_for(ALL)
            if number == SAVE:
                self.save = True
            elif launched and number == signal.SIGTERM and sender == parent:
                os._exit(128 + signal.SIGTERM)
            else:
                self.stop = True
                if "TORCHELASTIC_RUN_ID" in os.environ and not launched:
                    threading.Timer(PATIENCE_S, os._exit, [128 + signal.SIGTERM]).start()


def wait_for(numbers: set[signal.Signals]) -> tuple[int, int]:
    """The next of these (blocked) signals, and the process that sent it; 0 where the system (macOS) does not say."""
    if hasattr(signal, "sigwaitinfo"):
        found = signal.sigwaitinfo(numbers)
        return found.si_signo, found.si_pid
    return signal.sigwait(numbers), 0
