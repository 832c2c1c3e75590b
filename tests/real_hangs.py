"""Hangs of the real engine: eight gloo processes, TP 2 x PP 2 x DP 2, one of them planted; ended
and judged by trilane.

`PYTHONPATH=lib python tests/real_hangs.py [KIND ...]` does all ten and prints a row each, for
docs/hangs.md.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engine")]
from plans import changed, run_folder, small_plan  # noqa: E402

from trilane.launch.local import train_local  # noqa: E402
from trilane.workspace.status import RunStatus  # noqa: E402

# kind: (rank, iteration); `skip` shows at the end of the run, when its rank is there an iteration
# early
PLANTS = {
    "sleep": (5, 3),
    "mismatch": (3, 3),
    "stopped": (6, 3),
    "lock-held": (2, 3),
    "pipe": (1, 4),
    "deadlock": (7, 3),
    "exit": (4, 3),
    "skip": (5, 3),
    "data": (0, 3),
    "slow": (6, 4),
}
TIMEOUT_S = 6.0  # iterations take 0.1 s; the machine may be busy


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a plant."""

    kind: str
    rank: int
    outcome: RunStatus
    seconds: float  # from the plant, or the last sign of life, to the end of the run
    stacks: int  # ranks whose stack was taken, or that left a traceback
    ranks: int = 8

    @property
    def right(self) -> bool:
        return (
            self.outcome.rank == self.rank and self.stacks >= self.ranks - 1 and self.seconds < 60
        )

    def __str__(self) -> str:
        word = "yes" if self.right else "NO"
        cells = [
            self.kind,
            self.rank,
            self.outcome.status,
            self.outcome.rank,
            self.stacks,
            f"{self.seconds:.1f}",
            word,
        ]
        return f"| {' | '.join(map(str, cells))} |"


def hang(kind: str, folder: Path, data: Path, tp: int = 2, pp: int = 2, dp: int = 2) -> Result:
    """Run it in `folder` with that plant; on fewer processes the rank is counted round."""
    plan = small_plan(
        data, iters=12 if kind == "skip" else 100_000, source="mock", tp=tp, pp=pp, dp=dp
    )
    rank, iteration = PLANTS[kind][0] % plan.topology.gpus, PLANTS[kind][1]
    run_folder(changed(plan, "run", hang_timeout_s=TIMEOUT_S), folder)
    planted = str(Path(__file__).parent / "planted")
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "TRILANE_PLANT")}
    paths = [planted, *filter(None, [before["PYTHONPATH"]])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), TRILANE_PLANT=f"{kind} {rank} {iteration}")
    try:
        outcome = train_local(folder, show_progress=False, timeout_s=150)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    seconds, ranks = time.time() - moved(folder), plan.topology.gpus
    return Result(
        kind=kind, rank=rank, outcome=outcome, seconds=seconds, stacks=stacks(folder), ranks=ranks
    )


def library() -> dict[str, str]:
    """The environment of a child that is to find this trilane."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "lib")}


def moved(folder: Path) -> float:
    """When the training last got on: when its last iteration was written down."""
    path = folder / "steps.jsonl"
    return path.stat().st_mtime if path.exists() else 0.0


def stacks(folder: Path) -> int:
    """Ranks of which there is a stack: a dump, or a traceback of one that broke by itself."""
    dumps = {path.stem.removeprefix("rank_") for path in (folder / "stacks").glob("*/rank_*.*")}
    logs = {
        p.stem
        for p in (folder / "ranks").glob("*.log")
        if "Traceback" in p.read_text(errors="replace")
    }
    return len(dumps | logs)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(
            "| plant | rank | status | named | stacks | seconds | right |\n|---|---|---|---|---|---|---|"
        )
        results = []
        for name in sys.argv[1:] or PLANTS:
            results.append(hang(name, Path(place) / name, Path(place) / "corpus"))
            print(results[-1], flush=True)
            if not results[-1].right or len(sys.argv) > 1:
                print("   ", results[-1].outcome.evidence, file=sys.stderr)
        print(f"{sum(r.right for r in results)} of {len(results)}")
