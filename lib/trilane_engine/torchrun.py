"""torchrun that ends with its parent, forwards signals, and records which ranks failed, and how.

`python -m trilane_engine.torchrun FAILURES.json <torchrun's arguments>`.
torchrun itself only prints a report, dies of SIGUSR1, and kills its workers 30 s after a SIGTERM.
Here both reach the workers, which take the time that a save needs. torch is imported late: a signal
that comes while it is must not kill this process.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trilane.utils.files import replace_text
from trilane.utils.process import (
    adopt_environment,
    allow_open_files,
    announced,
    die_with_parent,
)
from trilane_engine.signals import ALL, FORWARDED, SAVE, STOP

# From the first node that waits to the last that comes; then the same from the first rank to the
# last. At 128 nodes the first import of torch from a shared file system takes minutes, and not the
# same on each node; torch 2.13 waits 60 s for the first node (read_timeout in
# c10d_rendezvous_backend.py), then 600 s for all (dynamic_rendezvous.py).
WAIT_S = 600


def main(argv: list[str]) -> int:
    """torchrun's exit code; FAILURES.json gets [{"rank": .., "pid": .., "exitcode": ..}] of those
    that failed first.
    """
    # Workers inherit the mask: a signal that comes while they import torch stays pending and kills
    # no process.
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    die_with_parent()
    allow_open_files()
    adopt_environment()  # SLURM's bash started this process, with a TMPDIR of the node
    os.environ.update(announced())
    os.environ[FORWARDED] = "1"
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    from trilane_engine import patches

    patches.after_start(api, _forward_signals())
    patches.listen_on_loopback(static_tcp_rendezvous)
    return _launch(argv)


def _launch(argv: list[str]) -> int:
    """Run torchrun as main() does, in a process that has prepared its signals."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api as rendezvous

    args = run.parse_args(argv[1:])
    if args.rdzv_backend == "c10d":
        args.rdzv_conf = settings(args.rdzv_conf)
    try:
        run.run(args)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "pid": failure.pid, "exitcode": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
        ]
        with contextlib.suppress(OSError):  # a full disk; the launcher reads the ranks' logs
            replace_text(Path(argv[0]), json.dumps(failures))
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except rendezvous.RendezvousConnectionError:
        return _failed(args, f"the first node does not answer at {args.rdzv_endpoint}")
    except rendezvous.RendezvousTimeoutError:
        return _failed(args, f"fewer than {args.nnodes.rpartition(':')[2]} nodes came")
    return 0


def _failed(args: Any, why: str) -> int:
    line = f"trilane: rendezvous={args.rdzv_id}: {why} ({args.rdzv_conf})"
    print(line, file=sys.stderr, flush=True)
    return 1


def settings(given: str, env: Mapping[str, str] = os.environ) -> str:
    """torchrun's --rdzv-conf: ours, where what is `given` does not name another value after it.

    In a job the first node hosts the store by SLURM's names: torch compares host names and
    addresses, and where they differ from SLURM's none does, or two.
    """
    # torch takes a node out whose last sign of life is three of 5 s old, by the clock of each node,
    # and nothing ever replaces it
    ours = f"join_timeout={WAIT_S},read_timeout={WAIT_S},keep_alive_max_attempt={WAIT_S // 5}"
    hosts = env.get("TRAIN_HOSTS", "").split()
    if hosts and "SLURMD_NODENAME" in env:
        ours += f",is_host={int(env['SLURMD_NODENAME'] == hosts[0])}"
    return f"{ours},{given}".strip(",")


def _forward_signals() -> Callable[[Any], None]:
    """Forward SIGUSR1 and SIGTERM to the workers as SAVE and STOP from now on, without torchrun.

    The result is to be called with workers that have started.
    """
    started: list[Any] = []

    def listen() -> None:
        while True:
            number = signal.sigwait(ALL)
            if not started:
                if number != SAVE:
                    os._exit(128 + number)
                continue
            for pid in started[-1].pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SAVE if number == SAVE else STOP)

    threading.Thread(target=listen, daemon=True).start()
    return started.append


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
