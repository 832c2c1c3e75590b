"""The tests' worker pool: a worker may answer a question about the engine instead, or plant a bug before it trains.

`ask.py` in the folder of a plan is run with `plan` and `join` at hand, and what it prints is kept in answer.RANK; the
file `plant` names one of restart_plants.BUGS.
"""

import contextlib
import json
import os
import posix
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from trilane.experiments.parity import WorkerPool, machine
from trilane.launch.local import environment


@contextlib.contextmanager
def engine_pool() -> Iterator[WorkerPool]:
    """The pool inside the block; its workers end with it, and nothing was compiled in any."""
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "built")
        env = {**environment(8), "TORCH_EXTENSIONS_DIR": str(built), "TORCH_COMPILE_DISABLE": "1"}
        with subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            yield WorkerPool(process=process, machine=machine(**json.loads(process.stdout.readline())))
        assert not built.exists(), "DeepSpeed compiled something, which takes 20 s and more"


def answer(folder: Path) -> int:
    """Run the folder's ask.py in this worker."""
    from trilane.config.plan import read_plan
    from trilane.engine.distributed.world import join
    from trilane.utils.process import die_with_parent

    die_with_parent()
    for number, name in enumerate(("answer.{}", "{}.log"), 1):
        os.dup2(os.open(folder / name.format(os.environ["RANK"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code = compile((folder / "ask.py").read_text(), str(folder / "ask.py"), "exec")
    exec(code, {"__name__": "__main__", "plan": read_plan(folder / "plan.json"), "join": join})
    return 0


def unmeasured() -> None:
    """Go on without coverage, which takes a quarter of a worker's time."""
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    os._exit = posix._exit  # coverage's own would write what the parent's imports were


def serve() -> None:
    """The library's pool, its work preceded or replaced by what lies in the folder."""
    from trilane.engine import worker_pool
    from trilane.utils.process import die_with_parent

    train, fork = worker_pool.work, worker_pool.fork_worker
    kinds: dict[tuple[object, ...], str] = {}
    measured = True

    def fork_worker(rank: int, size: int, port: str, folder: str) -> int:
        """Coverage counts what asks, and the first plan of each engine with TP, PP, ZeRO stage, precision, saves."""
        nonlocal measured
        plan = json.loads(Path(folder, "plan.json").read_text())
        topology, run = plan["topology"], plan["run"]
        sizes = (topology["tp"] > 1, topology["pp"] > 1, topology.get("zero"), topology.get("precision"))
        sizes += (bool(run["save_interval"]), bool(run["load"]), Path(folder, "checkpoints").exists())
        first = kinds.setdefault((size > 0, plan["engine"], *sizes), folder)
        measured = first == folder or Path(folder, "ask.py").exists()
        return fork(rank, size, port, folder)

    def work(size: int, folder: str) -> int:
        if not measured:
            unmeasured()
        plant = Path(folder, "plant")
        if plant.exists():
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from restart_plants import BUGS

            BUGS[plant.read_text()].plant()
        return answer(Path(folder)) if Path(folder, "ask.py").exists() else train(size, folder)

    worker_pool.work, worker_pool.fork_worker = work, fork_worker
    die_with_parent()
    print(json.dumps(worker_pool.machine()), flush=True)
    worker_pool.serve_forked()


if __name__ == "__main__":
    serve()
