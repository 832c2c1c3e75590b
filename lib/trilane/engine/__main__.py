"""`python -m trilane.engine plan.json` under torchrun or srun, or alone: train the plan in the folder that holds it."""

import os
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path

from trilane.config.plan import Plan, read_plan
from trilane.engine.errors import say
from trilane.engine.signals import Signals
from trilane.utils.files import set_aside
from trilane.utils.process import die_with_parent

RANK_LOGS = "TRILANE_RANK_LOGS"


# Who breaks because a peer is gone waits this long before he goes too, so that torchrun, which looks ten times a second
# and stops at the first dead it sees, sees the peer: a killed process may close its connections before it is gone.
COURTESY_S = 1.0


def main(argv: list[str]) -> int:
    """0 after the last iteration, and where a run ended as it was asked to (status.json says which of the two).

    2 and one line where plan, data or checkpoint cannot be trained, or not on this host (refusal.py); 1 otherwise.
    """
    begin, signals = time.monotonic(), Signals()
    die_with_parent()
    _own_log()
    if len(argv) != 1:
        print("usage: python -m trilane.engine plan.json", file=sys.stderr)
        return 2
    try:
        train = _prepare(Path(argv[0]), signals, begin)
    except ValueError as error:
        if not _is_ours(error):
            raise
        say(error)
        return 2
    train()
    return 0


def _prepare(path: Path, signals: Signals, begin: float) -> Callable[[], None]:
    """The training of the plan, ready to start; torch is imported only once the plan is known to be good."""
    plan = read_plan(path)
    one_queue(plan, os.environ)
    from trilane.engine.distributed.cpu import enable_cpu

    enable_cpu()
    from trilane.engine.distributed import world as places
    from trilane.engine.monitor import heartbeat

    places.from_slurm(os.environ)
    places.alone(os.environ)
    heartbeat.begin(plan, path.parent)
    world = places.join(plan)
    from trilane.engine.checkpoint.stamp import stamp, write_json
    from trilane.engine.loop import Training

    if world.is_first:
        set_aside(path.parent / "env.json")
        set_aside(path.parent / "status.json")
        (path.parent / "status.json").unlink(missing_ok=True)
        write_json(path.parent / "env.json", stamp(world))
    return Training(plan, world, path.parent, signals, begin).run


def one_queue(plan: Plan, env: MutableMapping[str, str]) -> None:
    """Megatron-LM's one queue, which keeps communication ahead of the matmuls that it overlaps with; it insists on it.

    Without tensor parallelism DeepSpeed overlaps on streams of its own, which want queues of their own.
    """
    if plan.engine == "megatron" or plan.topology.tp > 1:
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _own_log() -> None:
    """Send what this process says to ranks/<rank>.log where the launcher asks for it: lines of ranks never glue."""
    folder = os.environ.get(RANK_LOGS)
    if folder:
        log = os.open(f"{folder}/{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)


def _is_ours(error: ValueError) -> bool:
    """Whether trilane itself raised it: a rule that the user broke. A library's ValueError is our mistake."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def _leave(code: int) -> None:
    """End at once: waiting for the other ranks, as the normal way out does, would hide which rank was the first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        time.sleep(COURTESY_S)
        code = 1
    _leave(code)
