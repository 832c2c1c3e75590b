"""torchrun that ends with its parent process, forwards signals, and records which ranks failed, and how.

`python -m trilane.engine.torchrun FAILURES.json <torchrun's arguments>`; torchrun itself only prints a report, dies of
SIGUSR1, and kills its workers 30 s after a SIGTERM. Here both reach the workers, which take the time that a save needs.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from trilane.engine.signals import ALL, FORWARDED, SAVE, STOP
from trilane.utils.files import replace_text
from trilane.utils.process import announce, die_with_parent

LOOPBACK = "127.0.0.1"


def main(argv: list[str]) -> int:
    """torchrun's exit code; FAILURES.json gets [{"rank": .., "pid": .., "exitcode": ..}] of those that failed first."""
    # Workers inherit the mask: a signal that comes while they import torch stays pending and kills no process.
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    die_with_parent()
    os.environ.update(announce({}))
    os.environ[FORWARDED] = "1"
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _forward_signals()
    _listen_on_loopback()
    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        failures = [{"rank": r, "pid": f.pid, "exitcode": f.exitcode} for r, f in sorted(error.failures.items())]
        with contextlib.suppress(OSError):  # a full disk; the launcher reads the ranks' logs
            replace_text(Path(argv[0]), json.dumps(failures))
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _listen_on_loopback() -> None:
    """Let torchrun's store, which would listen on all interfaces, listen on the loopback where that is its address."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

    store = static.TCPStore

    def bound(host: str, port: int, world: int, is_master: bool, timeout: Any, **options: Any) -> Any:
        if is_master and host == LOOPBACK:
            options["master_listen_fd"] = socket.create_server((host, port)).detach()  # the store closes it
        return store(host, port, world, is_master, timeout, **options)

    static.TCPStore = bound  # type: ignore[misc,assignment]


def _forward_signals() -> None:
    """Forward SIGUSR1 and SIGTERM to the workers as SAVE and STOP from now on; torchrun does not receive them."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    workers: list[Any] = []
    start = SubprocessContext._start

    def remembered(context: Any) -> None:
        start(context)
        workers.append(context)

    def listen() -> None:
        while True:
            number = signal.sigwait(ALL)
            if not workers and number != SAVE:
                os._exit(128 + number)  # no worker has started yet
            for pid in workers[-1].pids().values() if workers else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SAVE if number == SAVE else STOP)

    SubprocessContext._start = remembered  # type: ignore[method-assign]
    threading.Thread(target=listen, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
