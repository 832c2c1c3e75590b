"""What a heartbeat costs: seconds of one beat, and its share of a step of the engine at toy size
and of a real one.

`python benchmarks/heartbeat.py [FOLDER]`: a folder on the file system of the heartbeats (default:
the temporary one). What many nodes cost a shared file system: heartbeat_cluster.py.
"""

import mmap
import statistics
import sys
import tempfile
import time
from pathlib import Path

from trilane.workspace.heartbeat import RECORD
from trilane_engine import phases
from trilane_engine.heartbeat import Heartbeat

BEATS = 20_000
# One step of TP 2 x PP 2 x DP 2 on two cores (docs/hangs.md), and the seeds' iterations: 60 s and
# more.
STEPS_S = {"toy step, 2 cores": 0.09, "one GPU's step": 1.0, "document 003's iteration": 60.0}
# Changes of phase in a step with m microbatches: data, and forward, backward and waiting for each
# of them.
CHANGES = {"toy step, 2 cores": 16, "one GPU's step": 6 * 8, "document 003's iteration": 6 * 512}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        with open(Path(place) / "0.beat", "w+b") as file:
            file.write(b"\0" * RECORD)
            file.flush()
            heartbeat = Heartbeat(mmap.mmap(file.fileno(), RECORD))
        costs = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(BEATS // 2):
                phases.begin(phases.FORWARD)
                phases.end()
            costs.append((time.perf_counter() - begin) / BEATS)
        heartbeat.close()
        begin = time.perf_counter()
        for _ in range(BEATS // 2):
            phases.begin(phases.FORWARD)
            phases.end()
        off = (time.perf_counter() - begin) / BEATS
    cost = statistics.median(costs)
    print(f"a change of phase: {1e6 * cost:.2f} us with a heartbeat, {1e6 * off:.2f} us without")
    for name, seconds in STEPS_S.items():
        print(
            f"{name} ({seconds} s, {CHANGES[name]} changes): {100 * cost * CHANGES[name] / seconds:.4f} %"
        )


if __name__ == "__main__":
    main()
