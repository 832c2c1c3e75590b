"""How fast logs are read: python benchmarks/read_speed.py [MEGABYTES] [--many FILES]

Writes synthetic logs to a temporary folder (TMPDIR): a Megatron log (a line an iteration, timers every tenth) and a log
that is mostly start-up text. Each is read once, on one core, in a process of its own, from the page cache;
`grep -c iteration` on the same file beside it. With --many, that many logs of 20 MB (links to four) go through
`trilane logs parse` on all cores.
"""

import argparse
import os
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


def read(path: Path) -> None:
    """Read the log and print what it took."""
    from trilane.analysis.measure import KEEP
    from trilane.logs.run import read_logs

    start, cpu = time.perf_counter(), time.process_time()
    (log,) = read_logs(path, KEEP)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    megabytes = path.stat().st_size / 1e6
    print(f"{path.name}: {len(log.iterations):,} iterations, {len(log.iterations.columns)} columns; {log.status}")
    print(f"  read: {megabytes / cpu:.0f} MB/s of one core, {megabytes / wall:.0f} by the clock; peak {peak:.0f} MiB")


def grep(path: Path) -> None:
    """What `grep -c iteration` takes."""
    start = time.perf_counter()
    count = int(subprocess.run(["grep", "-c", "iteration ", path], capture_output=True, check=True).stdout)
    wall = time.perf_counter() - start
    print(f"  grep -c iteration: {path.stat().st_size / 1e6 / wall:.0f} MB/s by the clock, {count:,} lines")


def many(folder: Path, count: int, size: int = 20 * 10**6) -> None:
    """`count` logs of 20 MB through `trilane logs parse`."""
    for number in range(4):
        write(folder / f"seed{number}", size)
    paths = [folder / f"{number}.log" for number in range(count)]
    for number, path in enumerate(paths):
        os.link(folder / f"seed{number % 4}", path)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "trilane", "logs", "parse", "--json", *paths], stdout=subprocess.DEVNULL, check=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cores = len(os.sched_getaffinity(0))
    print(f"{count} logs of 20 MB: {wall:.0f} s by the clock on {cores} cores, {cpu:.0f} s of processor time")


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
        for name, fill in (("iterations.log", write), ("start.log", write_start)):
            path = Path(folder) / name
            fill(path, args.megabytes * 10**6)
            subprocess.run([sys.executable, __file__, "--read", path], check=True)
            grep(path)
            path.unlink()


if __name__ == "__main__":
    main()
