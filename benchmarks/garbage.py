"""What Python's collections of garbage cost a training of two ranks (gloo): python
benchmarks/garbage.py

In the first half of the iterations Python collects when it likes, in the second the engine does, in
every tenth. Of each: the iterations in which some rank collected, in how many of them the other
rank did not, and waited, the pauses (CPU seconds of a collection), and how much memory a rank has
gained.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/engine"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill_saves import ended, fork
from plans import run_folder, small_plan

from trilane_engine import loop, parity

KINDS = ("automatic", "fixed")


class Recorder:
    """In place of loop._collect(), in each rank: its collections, and each 50 iterations its
    memory, as JSON.
    """

    def __init__(self, half: int) -> None:
        self._half, self._collect, self._begin = half, loop._collect, 0.0
        self._at: dict[str, Any] = {}

    def __call__(self, iteration: int, first: int) -> None:
        if iteration == first:
            gc.callbacks.append(self._called)
        self._at = {"kind": KINDS[iteration > self._half], "iteration": iteration}
        if iteration > self._half:
            self._collect(iteration, self._half + 1)
        if iteration % 50 == 0:
            self._write(bytes=resident_bytes())

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin = time.thread_time()
        elif self._at:
            self._write(seconds=time.thread_time() - self._begin, generation=info["generation"])

    def _write(self, **values: Any) -> None:
        with Path(os.environ["TRILANE_RANK_LOGS"], f"garbage-{os.environ['RANK']}.jsonl").open(
            "a"
        ) as file:
            file.write(json.dumps({**self._at, **values}) + "\n")


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="megatron", help="megatron or deepspeed-zero")
    parser.add_argument("--iterations", type=int, default=800)
    args = parser.parse_args()
    parity.load()
    loop._collect = Recorder(args.iterations // 2)
    with tempfile.TemporaryDirectory() as place:
        zero = {"zero": 3} if args.engine == "deepspeed-zero" else {}
        plan = small_plan(
            Path(place, "data"),
            engine=args.engine,
            iters=args.iterations,
            source="mock",
            dp=2,
            **zero,
        )
        folder = run_folder(plan, Path(place, "run"))
        codes = ended(fork(plan, folder), 1800)
        assert set(codes) == {0}, next(folder.rglob("0.log")).read_text()
        ranks = [
            [json.loads(line) for line in path.open()]
            for path in sorted(folder.rglob("garbage-*.jsonl"))
        ]
    for kind in KINDS:
        print(line(kind, ranks))
    return 0


def line(kind: str, ranks: list[list[dict[str, Any]]]) -> str:
    """What the collections of one kind cost."""
    who, pauses, gained = defaultdict[int, set[int]](set), list[float](), list[float]()
    for rank, values in enumerate(ranks):
        own = [value for value in values if value["kind"] == kind]
        for value in own:
            if "seconds" in value:
                who[value["iteration"]].add(rank)
                pauses.append(1e3 * value["seconds"])
        sizes = [value["bytes"] for value in own if "bytes" in value]
        gained.append((sizes[-1] - sizes[0]) / 1e6)
    alone = sum(len(found) < len(ranks) for found in who.values())
    cost = f"the longest {max(pauses, default=0):.2f} ms, all {sum(pauses):.1f} ms; memory {max(gained):+.1f} MB"
    return f"{kind}: some rank collected in {len(who)} iterations, one without the other in {alone}; {cost}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
