"""How fast a log is read: python benchmarks/read_speed.py [MEGABYTES]

Writes a synthetic Megatron log (a line an iteration, timers every tenth) to a temporary folder, and reads it once, on
one core, in a process of its own; `grep -c iteration` on the same file beside it, both from the page cache.
"""

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = (
    " [2026-08-01 12:{m:02d}:{s:02d}.{u:06d}] iteration {i:8d}/ 9000000 | consumed samples: {c:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {t:.1f} | learning rate: {lr:.6E} | "
    "global batch size:  2048 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {g:.3f} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
TIMERS = (
    "time (ms) | forward-compute: {f:.2f} | backward-compute: {b:.2f} | optimizer: {o:.2f} | batch-generator: 1.93\n"
)


def write(path: Path, size: int) -> int:
    """Write a log of about `size` bytes; its number of iterations."""
    draw, number = random.Random(1), 0
    with path.open("w") as file:
        while file.tell() < size:
            chunk = []
            for number in range(number + 1, number + 5001):  # noqa: B020 goes on where the last chunk ended
                ms, loss = 20000 * draw.lognormvariate(0, 0.05), 2 + 9 / (1 + number / 1000)
                grad, seconds = draw.lognormvariate(0, 1), int(number * ms / 1000)
                when = {"m": seconds // 60 % 60, "s": seconds % 60, "u": draw.randrange(10**6)}
                rate = {"ms": ms, "t": 3e6 / ms, "lr": 6e-5 / (1 + number / 1e6)}
                chunk.append(LINE.format(i=number, c=number * 2048, loss=loss, g=grad, **when, **rate))
                if number % 10 == 0:
                    chunk.append(TIMERS.format(f=ms * 0.3, b=ms * 0.6, o=ms * 0.02))
            file.writelines(chunk)
    return number


def read(path: Path) -> None:
    """Read the log and print what it took."""
    from trilane.logs import read_runs
    from trilane.parse_door import KEEP

    start, cpu = time.perf_counter(), time.process_time()
    (log,) = read_runs(path, KEEP)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    megabytes = path.stat().st_size / 1e6
    print(f"{len(log.iterations):,} iterations, columns {', '.join(log.iterations)}; status {log.status}")
    print(
        f"read: {megabytes / cpu:.0f} MB/s of one core, {megabytes / wall:.0f} MB/s by the clock; peak {peak:.0f} MiB"
    )


def main() -> None:
    """Write, count with grep, read in a process of its own."""
    if len(sys.argv) == 3:
        return read(Path(sys.argv[2]))
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.log"
        number = write(path, megabytes * 10**6)
        start = time.perf_counter()
        count = int(subprocess.run(["grep", "-c", "iteration ", path], capture_output=True, check=True).stdout)
        wall = time.perf_counter() - start
        print(f"grep -c iteration: {path.stat().st_size / 1e6 / wall:.0f} MB/s, {count:,} lines of {number:,} written")
        subprocess.run([sys.executable, __file__, "read", path], check=True)


if __name__ == "__main__":
    main()
