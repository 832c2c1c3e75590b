"""The tests' worker pool: a process that has imported every engine, and forks workers that train
small plans in turn.

A worker may answer a question about the engine instead, or plant a bug before it trains: `ask.py`
in the folder of a plan is run with `plan` and `join` at hand, and what it prints is kept in
answer.RANK; the file `plant` names one of restart_plants.BUGS.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import parity

from trilane.config.cluster import Cluster
from trilane.launch.local import environment
from trilane.utils.process import die_with_parent


@dataclass(frozen=True)
class WorkerPool:
    """The pool's process, and this machine as a cluster."""

    process: "subprocess.Popen[str]"
    machine: Cluster

    def run(self, processes: int, folder: Path, code: int = 0) -> str:
        """Train `folder`/plan.json (0 processes: the reference); "", or the workers' output where
        they ended otherwise than with `code`.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{processes} {folder}\n")
        self.process.stdin.flush()
        return parity.output(
            folder, [int(found) for found in self.process.stdout.readline().split()], code
        )


@contextlib.contextmanager
def engine_pool() -> Iterator[WorkerPool]:
    """The pool inside the block; its workers end with it, and nothing was compiled in any."""
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "built")
        env = {**environment(8), "TORCH_EXTENSIONS_DIR": str(built), "TORCH_COMPILE_DISABLE": "1"}
        with subprocess.Popen(
            [sys.executable, __file__], env=env, text=True, stdin=pipe, stdout=pipe
        ) as process:
            yield WorkerPool(process, parity.machine(cards=0, bf16=True))
        assert not built.exists(), "DeepSpeed compiled something, which takes 20 s and more"


def work(size: int, folder: Path) -> int:
    """What one worker does."""
    if (folder / "plant").exists():
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from restart_plants import BUGS

        BUGS[(folder / "plant").read_text()].plant()
    return answer(folder) if (folder / "ask.py").exists() else parity.run_worker(size, folder)


def answer(folder: Path) -> int:
    """Run the folder's ask.py in this worker."""
    from trilane.config.plan import read_plan
    from trilane_engine.world import join

    die_with_parent()
    for number, name in enumerate(("answer.{}", "{}.log"), 1):
        os.dup2(
            os.open(
                folder / name.format(os.environ["RANK"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND
            ),
            number,
        )
    code = compile((folder / "ask.py").read_text(), f"{folder}/ask.py", "exec")
    exec(code, {"__name__": "__main__", "plan": read_plan(folder / "plan.json"), "join": join})
    return 0


if __name__ == "__main__":
    die_with_parent()
    parity.load()
    for line in sys.stdin:
        count, place = line.rstrip("\n").split(" ", 1)
        print(*parity.train(int(count), Path(place), work), flush=True)
