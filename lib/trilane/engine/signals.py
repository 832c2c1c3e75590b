"""Signals: what this process was asked by the system, kept until the loop looks.

SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end. Under our own launcher torchrun passes them on as
SIGUSR1 and SIGUSR2, and a plain SIGTERM keeps its meaning, the end at once: that is how it clears up after a dead rank.
"""

import os
import signal
import threading
from typing import Any

FORWARDED = "TRILANE_FORWARDS_SIGNALS"  # set by our launcher
SAVE, STOP = signal.SIGUSR1, signal.SIGUSR2
# torchrun itself kills its workers 30 s after the SIGTERM that it sends them for whatever reason. Who hangs on a dead
# peer by then must not take as long as that.
PATIENCE_S = 25.0


class Signals:
    """Listens from the moment it is made, in the main thread; signals that waited for it arrive at once."""

    def __init__(self) -> None:
        self.save = self.stop = False
        self._hurried = "TORCHELASTIC_RUN_ID" in os.environ and FORWARDED not in os.environ
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own answer waits until a collective operation returns
        signal.signal(SAVE, self._ask_save)
        signal.signal(STOP if FORWARDED in os.environ else signal.SIGTERM, self._ask_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE, STOP})

    def _ask_save(self, *_: Any) -> None:
        self.save = True

    def _ask_stop(self, *_: Any) -> None:
        self.stop = True
        if self._hurried:
            timer = threading.Timer(PATIENCE_S, os._exit, [128 + signal.SIGTERM])
            timer.daemon = True
            timer.start()
