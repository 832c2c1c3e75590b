"""How fast logs are read: python benchmarks/read_speed.py [MEGABYTES] [--many FILES]

Writes synthetic logs to a temporary folder (TMPDIR): a Megatron log (a line an iteration), the same
with a line of timers or DeepSpeed's `step=` beside each, many short runs in a file, torchtitan's
lines, and a log that is mostly start-up text. Each is read once, on one core, in a process of its
own, from the page cache; and then by a plain loop of regular expressions that takes the same
numbers. With --many, that many logs of 20 MB (links to four) go through `trilane logs parse` on all
cores.
"""

import argparse
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

LINE = (
    " [2026-08-01 12:{m:02d}:{s:02d}.{u:06d}] iteration {i:8d}/ 9000000 | consumed samples: {c:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {t:.1f} | learning rate: {lr:.6E} | "
    "global batch size:  2048 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {g:.3f} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
TIMERS = "time (ms) | forward-compute: {f:.2f} | backward-compute: {b:.2f} | optimizer: {o:.2f} | batch-generator: 1.93\n"


def write(path: Path, size: int) -> int:
    """Write a log of about `size` bytes, of iterations alone; its number of iterations."""
    draw, number = random.Random(1), 0
    with path.open("w") as file:
        while file.tell() < size:
            chunk = []
            for number in range(number + 1, number + 5001):  # noqa: B020
                ms, loss = 20000 * draw.lognormvariate(0, 0.05), 2 + 9 / (1 + number / 1000)
                grad, seconds = draw.lognormvariate(0, 1), int(number * ms / 1000)
                when = {"m": seconds // 60 % 60, "s": seconds % 60, "u": draw.randrange(10**6)}
                rate = {"ms": ms, "t": 3e6 / ms, "lr": 6e-5 / (1 + number / 1e6)}
                chunk.append(
                    LINE.format(i=number, c=number * 2048, loss=loss, g=grad, **when, **rate)
                )
            file.writelines(chunk)
    return number


START = """\
[2026-08-01 12:00:00,{m:03d}] [INFO] [utils.py:{a}:see_usage] CPU Virtual Memory:  used = {a}.{b} GB, percent = {b}.{c}%
[2026-08-01 12:00:{b:02d},{m:03d}] [WARNING] [runner.py:{a}:fetch_hostfile] Unable to find hostfile
[default{c}]: > loading shuffle-idx mapping from /scratch/data/text_document_train_indexmap_{a}ns_2048sl_{b}s_idx.npy
[default{c}]:    loaded indexed file in 0.0{b} seconds
[default{c}]:    total number of samples: {m}{a}
r{a}i{c}n{b}: /opt/lib/python3.8/dataloader.py:{a}: UserWarning: This DataLoader will create {c} workers.
[default{c}]:[INFO] [engine.py:{a}:load_checkpoint] rank {m}: successfully read mp_rank_{b} of step folder
Loading extension module fused_mix_prec_layer_norm_cuda took {b}.{c} seconds on rank {m}
r{a}i{c}n{b}:{m}:{a} [{c}] NCCL INFO Channel {b} : {c}[{m}] -> {b}[{a}] via NET/IB/{c}/GDRDMA
r{a}i{c}n{b}:{m}:{a} [{c}] NCCL INFO NET/IB : Using [0]mlx5_{c}:1/IB ; OOB ib0:10.{a}.{b}.{c}<0>
 > number of parameters on (tensor, pipeline) model parallel rank ({c}, {b}): {m}{a}{b}
saving checkpoint at iteration {m} to /scratch/checkpoints/tr11
 validation loss at iteration {m} | lm loss value: {c}.{m}E+00 | lm loss PPL: {b}.{m}E+01 |
layer {c} of the transformer has been rebuilt from the latest snapshot of the weights
""".splitlines(keepends=True)


def write_start(path: Path, size: int) -> None:
    """Write a log of about `size` bytes of start-up text, with ten iterations at its end."""
    draw = random.Random(2)
    with path.open("w") as file:
        while file.tell() < size:
            numbers = (
                {"m": draw.randrange(1000), "a": draw.randrange(10, 1000), "b": draw.randrange(100)}
                for _ in range(5000)
            )
            file.writelines(draw.choice(START).format(c=draw.randrange(8), **n) for n in numbers)
    write(path.with_name("end"), 1)
    with path.open("a") as file:
        file.writelines(path.with_name("end").read_text().splitlines(keepends=True)[:10])


STEP = (
    "[2026-08-01 12:{m:02d}:{s:02d},{u:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=4, "
    "lr=[{lr:.6e}, {lr:.6e}], mom=[(0.9, 0.95), (0.9, 0.95)]\n"
)
TITAN = (
    "[rank0]:[titan] 2026-08-01 12:{m:02d}:{s:02d},{u:03d} - root - INFO - step: {i:2d}  loss: {loss:7.4f}  "
    "grad_norm: {g:7.4f}  memory: 38.50GiB(40.53%)  tps: {tps:,}  tflops: {t:.2f}  mfu: {mfu:.2f}%\n"
)
ARGUMENTS = "------------------------ arguments ------------------------\n"
ARGUMENTS += "".join(f"  argument_number_{n} {'.' * 30} {n}\n" for n in range(50))
ARGUMENTS += "-------------------- end of arguments ---------------------\n"
LAUNCH = "using world size: 64, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 8\n"
RUN = 50  # iterations of a short run
EXIT = "[exiting program after 1190.0 minutes] datetime: 2026-08-01 12:00:00\n"


def write_mixed(path: Path, size: int, kind: str) -> None:
    """Write a log of about `size` bytes of that kind of lines: see PLAIN."""
    draw, number = random.Random(3), 0
    with path.open("w") as file:
        while file.tell() < size:
            chunk = []
            for number in range(number + 1, number + 5001):  # noqa: B020
                of_run = (number - 1) % RUN + 1 if kind == "short runs" else number
                if kind == "short runs" and of_run == 1:
                    chunk += [LAUNCH, ARGUMENTS]
                ms = 20000 * draw.lognormvariate(0, 0.05)
                when = {
                    "m": number // 3 % 60,
                    "s": number * 20 % 60,
                    "u": draw.randrange(1000),
                    "i": of_run,
                }
                of = {
                    "ms": ms,
                    "t": 3e6 / ms,
                    "lr": 6e-5 / (1 + number / 1e6),
                    "loss": 2 + 9 / (1 + number / 1000),
                }
                of |= {
                    "g": draw.lognormvariate(0, 1),
                    "tps": int(1.4e8 / ms),
                    "mfu": 1e6 / ms,
                    "c": number * 2048,
                }
                chunk.append((TITAN if kind == "torchtitan" else LINE).format(**when, **of))
                if kind == "step beside":
                    chunk.append(STEP.format(**when, **of))
                if kind == "timers beside":
                    chunk.append(TIMERS.format(f=ms * 0.3, b=ms * 0.6, o=ms * 0.02))
                if kind == "short runs" and of_run == RUN:
                    chunk.append(EXIT)
            file.writelines(chunk)


VALUE = rb"\s*([-+\d.,eE]+)"
NAMES = "consumed samples,elapsed time per iteration (ms),throughput per GPU (TFLOP/s/GPU),learning rate,"
NAMES += "global batch size,lm loss,loss scale,grad norm,number of skipped iterations,number of nan iterations"
ITERATION = rb"iteration\s+(\d+)/\s*(\d+) \|" + b"".join(
    b" " + re.escape(name.encode()) + b":" + VALUE + rb" \|" for name in NAMES.split(",")
)
TIMER = rb"time \(ms\) \|" + rb"[^:]*:\s*([\d.]+)" * 4
PLAIN = {  # the regular expressions that take the same numbers out of the lines of each kind of log
    "iterations": [ITERATION],
    "timers beside": [ITERATION, TIMER],
    "step beside": [ITERATION, rb"step=(\d+), skipped=(\d+), lr=\[([\d.e-]+)"],
    "short runs": [ITERATION, rb"^  \w+ \.+ (\d+)"],
    "torchtitan": [
        rb"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+) +memory: +([\d.]+)GiB\(([\d.]+)%\) +tps: ([\d,]+) +"
        rb"tflops: ([\d.]+) +mfu: ([\d.]+)%"
    ],
}


def plain(path: Path, kind: str) -> float:
    """Processor seconds of a loop over the lines that tries the patterns, and turns what they find
    into numbers.
    """
    patterns, rows, start = [re.compile(p) for p in PLAIN[kind]], [], time.process_time()
    with path.open("rb") as file:
        for line in file:
            for pattern in patterns:
                if found := pattern.search(line):
                    rows.append([float(text.replace(b",", b"")) for text in found.groups()])
                    break
    assert rows
    return time.process_time() - start


def read(path: Path) -> None:
    """Read the log and print what it took."""
    import pandas  # noqa: F401

    from trilane.logs.run import read_logs

    start, cpu = time.perf_counter(), time.process_time()
    logs = read_logs(path)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    megabytes = path.stat().st_size / 1e6
    rows, kind = sum(len(log.iterations) for log in logs), path.stem
    print(
        f"{kind}: {len(logs)} runs, {rows:,} iterations, {len(logs[0].iterations.columns)} columns; {logs[-1].status}"
    )
    print(
        f"  read: {megabytes / cpu:.0f} MB/s of one core, {megabytes / wall:.0f} by the clock; peak {peak:.0f} MiB"
    )
    if kind in PLAIN:
        seconds = plain(path, kind)
        ratio = f"reading takes {cpu / seconds:.2f} of its time"
        print(f"  a loop of regular expressions: {megabytes / seconds:.0f} MB/s; {ratio}")


def many(folder: Path, count: int, size: int = 20 * 10**6) -> None:
    """`count` logs of 20 MB through `trilane logs parse`."""
    for number in range(4):
        write(folder / f"seed{number}", size)
    paths = [folder / f"{number}.log" for number in range(count)]
    for number, path in enumerate(paths):
        os.link(folder / f"seed{number % 4}", path)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "trilane", "logs", "parse", "--json", *paths],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cores = len(os.sched_getaffinity(0))
    print(
        f"{count} logs of 20 MB: {wall:.0f} s by the clock on {cores} cores, {cpu:.0f} s of processor time"
    )


def main() -> None:
    """Write, read each in a process of its own, count with grep."""
    parser = argparse.ArgumentParser(description="how fast logs are read")
    parser.add_argument("megabytes", type=int, nargs="?", default=1000)
    parser.add_argument("--many", type=int, default=0, metavar="FILES")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        return read(args.read)
    with tempfile.TemporaryDirectory() as folder:
        if args.many:
            return many(Path(folder), args.many)
        fills: dict[str, Callable[[Path, int], object]] = {
            "iterations": write,
            "start": write_start,
        }
        fills |= {kind: partial(write_mixed, kind=kind) for kind in PLAIN if kind != "iterations"}
        for kind, fill in fills.items():
            path = Path(folder) / f"{kind}.log"
            fill(path, args.megabytes * 10**6)
            subprocess.run([sys.executable, __file__, "--read", path], check=True)
            path.unlink()


if __name__ == "__main__":
    main()
