"""After how many iterations a slowed rank of a real run is named, and how often a clean run is
accused.

`PYTHONPATH=lib python benchmarks/slow_rank.py [SLOWED [CLEAN]]`: runs of 4 gloo processes (PP 2 x
DP 2). In each of the slowed ones a rank gets a 7th, 9th or 12th of the time, from iteration 40 on;
the clean ones have 300 iterations. The name and the iteration are those of ranks/pace.jsonl.
"""

import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engine")]
from plans import SHAPE, changed, run_folder, small_plan  # noqa: E402

from trilane.launch.local import train_local  # noqa: E402
from trilane.utils.files import json_lines, read_text  # noqa: E402
from trilane.workspace.heartbeat import own_beats  # noqa: E402

BEGIN, CYCLE_S = 40, 0.036


def slow_down(folder: Path, rank: int, times: int, begun: list[int]) -> None:
    """Slow the rank down so many times, until the run is accused or ends."""
    while rank not in (beats := own_beats(folder)) or beats[rank].step < BEGIN:
        time.sleep(0.05)
    begun.append(beats[rank].step)
    try:
        pid = beats[rank].pid
        while not read_text(folder / "ranks/pace.jsonl"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(CYCLE_S * (1 - 1 / times))
            os.kill(pid, signal.SIGCONT)
            time.sleep(CYCLE_S / times)
    except ProcessLookupError:
        return
    (folder / "stop").touch()


def train(place: Path, rank: int = -1, times: int = 0) -> str:
    """One run, slowed where a rank is given; a row about it."""
    shape = dataclasses.replace(SHAPE, hidden_size=512) if times else SHAPE
    plan = small_plan(
        place / "data", iters=120 if times else 300, source="mock", shape=shape, pp=2, dp=2
    )
    # a machine that is predicted ten times as fast: the run leaves the plan's interval with its own
    # pace
    plan = changed(
        plan, "cluster", gpu=dataclasses.replace(plan.cluster.gpu, fp32_flops_per_s=1e12)
    )
    folder = run_folder(changed(plan, "run", log_interval=10), place / f"run{time.monotonic_ns()}")
    begun = list[int]()
    if times:
        threading.Thread(target=slow_down, args=(folder, rank, times, begun), daemon=True).start()
    outcome = train_local(folder, show_progress=False, timeout_s=900)
    events = [e for e in json_lines(read_text(folder / "ranks/pace.jsonl")) if e["text"]]
    seconds = sorted(float(e["sec_per_it"]) for e in json_lines(read_text(folder / "steps.jsonl")))
    after = [event["iteration"] - 1 - begun[0] for event in events[:1]] if begun else []
    cells = [
        rank,
        times,
        outcome.status,
        *after,
        f"median {seconds[len(seconds) // 2]:.3f} s",
        json.dumps(events),
    ]
    return f"load {os.getloadavg()[0]:.1f} | " + " | ".join(map(str, cells))


def main() -> None:
    slowed, clean = (int(word) for word in (*sys.argv[1:], "6", "10")[:2])
    with tempfile.TemporaryDirectory() as place:
        for number in range(slowed):
            print(train(Path(place), number % 4, (7, 9, 12)[number % 3]), flush=True)
        for _ in range(clean):
            print(train(Path(place)), flush=True)


if __name__ == "__main__":
    main()
