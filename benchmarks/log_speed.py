"""Logs in seconds and bytes, relative to a plain regex loop: python benchmarks/log_speed.py

Both read the same generated file in turns of one run, so that a load from outside falls on both;
the ratio is the loop's processor time over ours, of the fastest of each. The loop is what a person
writes for one question: five numbers of Megatron's iteration lines. `trilane.logs` reads every
number of every trainer, timers, arguments and endings meanwhile. The memory is the most that a
process of its own had while it read a log of `--bytes`.
"""

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trilane.logs.run import read_logs

TOTAL = 500_000  # iterations that a run plans
RUNS = 400
# NVIDIA/Megatron-LM: megatron/training/training.py
ITERATION = (
    " [2026-08-01 {h:02d}:{m:02d}:{s:02d}.{us:06d}] iteration {i:8d}/{total:8d} |"
    " consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f} |"
    " throughput per GPU (TFLOP/s/GPU): {rate:.1f} | learning rate: {lr:.6E} |"
    " global batch size: {gbs:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
# deepspeedai/DeepSpeed: deepspeed/runtime/engine.py, deepspeed/utils/timer.py
DEEPSPEED = (
    "[2026-08-01 {h:02d}:{m:02d}:{s:02d},{k:03d}] [INFO] [logging.py:96:log_dist] [Rank 0]"
    " step={i}, skipped=0, lr=[{lr!r}, {lr!r}], mom=[(0.9, 0.95), (0.9, 0.95)]\n"
    "[2026-08-01 {h:02d}:{m:02d}:{s:02d},{k:03d}] [INFO] [timer.py:260:stop] epoch=0/"
    "micro_step={i}/global_step={i}, RunningAvgSamplesPerSec={running!r},"
    " CurrSamplesPerSec={current!r}, MemAllocated=17.21GB, MaxMemAllocated=58.84GB\n"
)
LAUNCH = (
    "using world size: 64, data-parallel size: 8, tensor-model-parallel size: 8\n"
    "------------------------ arguments ------------------------\n"
    "  hidden_size ..................................... 6144\n"
    "  num_layers ...................................... 40\n"
    "-------------------- end of arguments ---------------------\n"
)
CRASH = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "pretrain_gpt.py", line 1, in <module>\n'
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"
)


def values(i: int, rng: random.Random) -> dict[str, float]:
    """The numbers of an iteration."""
    seconds = 2 * i
    ms = 2000 + 50 * rng.random()
    return {
        "i": i,
        "total": TOTAL,
        "h": seconds // 3600 % 24,
        "m": seconds // 60 % 60,
        "s": seconds % 60,
        "us": rng.randrange(10**6),
        "k": rng.randrange(1000),
        "samples": 1024 * i,
        "gbs": 1024,
        "ms": ms,
        "rate": 8e5 / ms,
        "lr": 1e-4 / (1 + i / TOTAL),
        "loss": 2 + 9 / (1 + i / 1000) + rng.random() / 10,
        "norm": 0.2 + rng.random(),
        "running": 512 + rng.random(),
        "current": 1024e3 / ms,
    }


def iterations(count: int, form: str = ITERATION) -> Iterator[str]:
    """Lines of a run."""
    rng = random.Random(count)
    for i in range(1, count + 1):
        yield form.format(**values(i, rng))


def runs(count: int) -> Iterator[str]:
    """Lines of RUNS runs that each end by an error."""
    for _ in range(RUNS):
        yield LAUNCH
        yield from iterations(count // RUNS)
        yield CRASH


PATTERNS = {
    "ms": re.compile(rb"elapsed time per iteration \(ms\): ([\d.]+)"),
    "loss": re.compile(rb"lm loss: ([\d.E+-]+)"),
    "norm": re.compile(rb"grad norm: ([\d.]+)"),
    "lr": re.compile(rb"learning rate: ([\d.E+-]+)"),
}
NUMBER = re.compile(rb"iteration +(\d+)/")


def plain(path: Path) -> list[dict[str, float]]:
    """The loop: five numbers of each iteration line."""
    rows = []
    with path.open("rb") as file:
        for line in file:
            number = NUMBER.search(line)
            if not number:
                continue
            row = {"iteration": float(number[1])}
            for name, pattern in PATTERNS.items():
                match = pattern.search(line)
                if match:
                    row[name] = float(match[1])
            rows.append(row)
    return rows


def ratio(path: Path, count: int, pairs: int) -> dict[str, float]:
    """Seconds of the loop and of the reader, and the first over the second."""
    times: dict[str, list[float]] = {"loop_s": [], "reader_s": []}
    readers: dict[str, Callable[[Path], int]] = {
        "loop_s": lambda path: len(plain(path)),
        "reader_s": lambda path: sum(len(run.iterations) for run in read_logs(path)),
    }
    for _ in range(pairs):
        for name, reader in readers.items():
            start = time.process_time()
            rows = reader(path)
            times[name].append(time.process_time() - start)
            assert rows == count, f"{name}: {rows} of {count} iterations"
    best = {name: min(seconds) for name, seconds in times.items()}
    return {"ratio": best["loop_s"] / best["reader_s"], **best}


def peak_bytes(path: Path) -> int:
    """The most memory that a process has which reads the log."""
    command = [sys.executable, __file__, "--read", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def write(path: Path, lines: Iterator[str], size: int) -> None:
    """Lines up to so many bytes (0: all)."""
    with path.open("w") as file:
        left = size or float("inf")
        for line in lines:
            left -= file.write(line)
            if left < 0:
                break


def main() -> None:
    """Print the ratios and the memory, as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--bytes", type=float, default=500e6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_logs(args.read)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    count = args.iterations
    logs = {
        "iterations": iterations(count),
        "deepspeed": iterations(count, DEEPSPEED + ITERATION),
        "runs": runs(count),
    }
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        write(path, iterations(int(args.bytes)), int(args.bytes))
        # first: Linux counts the memory of who starts a process as the process's own
        results["memory"] = {"log_bytes": args.bytes, "peak_bytes": peak_bytes(path)}
        for name, lines in logs.items():
            write(path, lines, 0)
            results[name] = ratio(path, count, args.pairs)
    if args.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        print(name, *(f"{key} {value:.4g}" for key, value in result.items()), sep="  ")


if __name__ == "__main__":
    main()
