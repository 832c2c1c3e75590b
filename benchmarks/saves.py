"""How long saves stop the training, and how fast they and loads are, on this machine: python
benchmarks/saves.py

A GPT of about 43 million parameters (516 MB) trains some iterations and saves after some of them;
then it is loaded. The bytes per second are those of the log, until the checkpoint has its name; the
disk's are those of a file of the same size that is written and synchronised, and read, by one
process.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/engine"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill_saves import ended, fork
from plans import changed, run_folder, small_plan, steps

from trilane.config.plan import Plan
from trilane_engine import parity

T = TypeVar("T")
LAYOUTS = {
    "megatron, one process": {},
    "megatron DP2 distributed optimizer": {"dp": 2, "zero": 1},
    "deepspeed-zero ZeRO-3 DP2": {"engine": "deepspeed-zero", "dp": 2, "zero": 3},
}
SAVED = re.compile(r"\(([\d.]+) MB in ([\d.]+) s, training stopped for ([\d.]+) s\)")
BLOCK = 1 << 24


def disk(folder: Path, size: int) -> tuple[float, float]:
    """Bytes per second of writing a file of so many bytes, synchronised, and of reading it from
    memory.
    """
    path, block, begin = folder / "disk", os.urandom(BLOCK), time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written, begin = time.perf_counter() - begin, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK):
            pass
    read = time.perf_counter() - begin
    path.unlink()
    return size / written, size / read


def trained(plan: Plan, folder: Path) -> str:
    """The log of rank 0."""
    codes = ended(fork(plan, folder), 600)
    log = (folder / "0.log").read_text()
    assert set(codes) == {0}, log
    return log


def measure(name: str, place: Path, iterations: int, interval: int) -> None:
    """Print the saves and the load of one layout."""
    small = small_plan(
        place / "data", iters=iterations, source="mock", **{"mbs": 1, "gbs": 4, **LAYOUTS[name]}
    )
    shape = replace(
        small.shape,
        num_layers=12,
        hidden_size=512,
        num_attention_heads=8,
        seq_length=128,
        vocab_size=10240,
    )
    plan = replace(changed(small, "run", save_interval=interval), shape=shape)
    folder = run_folder(plan, place / name)
    found = [tuple(map(float, match)) for match in SAVED.findall(trained(plan, folder))]
    rates = [disk(place, int(1e6 * found[0][0])) for _ in range(3)]
    write, read = (statistics.median(rate) / 1e6 for rate in zip(*rates, strict=True))
    print(f"{name}: disk {write:.0f} MB/s written, {read:.0f} MB/s read")
    times = [step["sec_per_it"] for step in steps(folder)]
    busy = {k for k in range(len(times)) if k >= interval and k % interval == 0}
    calm = statistics.median(t for k, t in enumerate(times) if k and k not in busy)
    print(
        f"  iterations: {calm:.2f} s, {statistics.median(times[k] for k in busy):.2f} s right after a save begins"
    )
    for megabytes, seconds, stall_s in found:
        rate, share = megabytes / seconds, 100 * stall_s / seconds
        print(
            f"  {megabytes:.0f} MB in {seconds:.2f} s: {rate:.0f} MB/s; training stopped for {share:.1f} % of it"
        )
    loads(plan, folder)


def loads(plan: Plan, folder: Path) -> None:
    """Print the time of a load, and that of reading its files, each from the disk and from memory."""
    files = sorted(next(iter(sorted((folder / "checkpoints").glob("iter_*"))[::-1])).iterdir())
    for where in ("disk", "memory"):
        seconds = []
        for load in (False, True):
            for path in files if where == "disk" else ():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            for path in () if load else files:
                with path.open("rb", buffering=0) as file:
                    while file.read(BLOCK):
                        pass
            seconds.append(time.perf_counter() - begin)
            if load:
                (folder / "seconds").unlink(missing_ok=True)
                trained(plan, folder)
                seconds[-1] = sum(map(float, (folder / "seconds").read_text().split()))
        read, load_s = seconds
        print(
            f"  load from {where}: {load_s:.2f} s, {load_s / read:.1f} times the {read:.2f} s of reading the files"
        )


def timed(function: Callable[..., T]) -> Callable[..., T]:
    """The same, which leaves its seconds in the run folder of rank 0."""

    def called(*args: Any) -> T:
        begin = time.perf_counter()
        found = function(*args)
        if os.environ["RANK"] == "0":
            with Path(os.environ["TRILANE_RANK_LOGS"], "seconds").open("a") as file:
                file.write(f"{time.perf_counter() - begin}\n")
        return found

    return called


def main() -> int:
    """0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layout", action="append", choices=list(LAYOUTS), help="these alone (default: all)"
    )
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--interval", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (default: the temporary one)"
    )
    args = parser.parse_args()
    parity.load()
    from trilane_engine import loop

    loop.find, loop.load = timed(loop.find), timed(loop.load)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for name in args.layout or LAYOUTS:
            measure(name, Path(place), args.iterations, args.interval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
