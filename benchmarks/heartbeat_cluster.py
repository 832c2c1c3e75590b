"""What the heartbeats of 1,024 ranks on 128 nodes cost the shared file system, and how soon a fault
is judged.

`PYTHONPATH=lib python benchmarks/heartbeat_cluster.py [hang | dead | exit | none] [--nodes 128]
[--timeout 150]`: on this machine, with the watchdog's own code and intervals. Each node is two
processes: one writes the heartbeats of its eight ranks, one is the watchdog. Simulated are the
host's name, the stacks (tests/job.py; py-spy would find no training) and the fault: one rank that
stops, a node that is killed whole, a rank that exits. The clock of node 5 is an hour ahead.

Counted in each watchdog, for the run folder only: opens of files and folders (Python's audit events
"open", "os.listdir", "os.scandir"), other calls by name (stat, lstat, rename, mkdir, remove), and
the bytes of the files that were opened for reading and of those that were renamed.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from dumps import pyspy_text
from job import Stack, elsewhere, first, program, stand
from support import small_plan

from trilane.utils.files import replace_text
from trilane.utils.process import die_with
from trilane.workspace import heartbeat
from trilane.workspace.heartbeat import create_record, encode, read_reports
from trilane.workspace.rank_grid import regular
from trilane.workspace.status import read_status
from trilane_diagnose import capture, watchdog

PER_NODE = 8
SETTLE_S, COUNT_S = 20.0, 60.0  # after the start; of quiet training, in which calls are counted
FIELDS = ("opens", "others", "bytes read", "bytes written")
OTHERS = {"os.rename": 0, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.link": 0}


def count_calls(folder: Path, counts: Any) -> None:
    """Count this process's calls on files below `folder` from now on into the four `counts`."""
    inside, stat, lstat = str(folder), os.stat, os.lstat

    def size(path: Any) -> int:
        try:
            return stat(path).st_size
        except OSError:
            return 0

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if (
            event not in ("open", "os.listdir", "os.scandir") and event not in OTHERS
        ) or not isinstance(args[0], str | os.PathLike):
            return
        if not os.fspath(args[0]).startswith(inside):
            return
        if event not in OTHERS:
            counts[0] += 1
            counts[2] += size(args[0]) if event == "open" and args[1] in ("r", "rb", None) else 0
        else:
            counts[1] += 1
            counts[3] += size(args[0]) if event == "os.rename" else 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **words: Any) -> Any:
            counts[1] += isinstance(path, str | os.PathLike) and os.fspath(path).startswith(inside)
            return call(path, *args, **words)

        return wrapped

    os.stat, os.lstat = counted(stat), counted(lstat)
    sys.addaudithook(audit)


class Job:
    """The run in `folder`, its simulated nodes, and the fault that is planted at `fault_at`
    (monotonic clock).
    """

    def __init__(self, folder: Path, nodes: int, timeout_s: float, fault: str) -> None:
        self.folder, self.nodes, self.fault = folder, nodes, fault
        pp = min(16, nodes)
        shape = replace(small_plan().shape, num_layers=pp, num_attention_heads=PER_NODE)
        topology = replace(
            small_plan().topology, tp=PER_NODE, pp=pp, dp=nodes // pp, gbs=64 * nodes
        )
        run = replace(small_plan().run, hang_timeout_s=timeout_s)
        cluster = replace(small_plan().cluster, gpus_per_node=PER_NODE, max_nodes=nodes)
        self.plan = replace(small_plan(), shape=shape, topology=topology, run=run, cluster=cluster)
        replace_text(folder / "plan.json", json.dumps(self.plan.to_json()))
        self.there = [*heartbeat.BASE.glob("trilane-*")]
        self.rank = 5 + PER_NODE * (2 * nodes // 3)  # the faulty one
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.fault_at = ctypes.c_double.from_buffer(self.memory)
        self.counts = (ctypes.c_double * (len(FIELDS) * nodes)).from_buffer(
            mmap.mmap(-1, 8 * len(FIELDS) * nodes)
        )
        self.stacks = self._stacks()

    def _stacks(self) -> dict[int, Stack]:
        """Where all ranks stand after the fault."""
        t = self.plan.topology
        grid = regular(t.tp, t.pp, t.dp, PER_NODE)
        programs = {rank: program(grid, rank) for rank in grid.ranks}
        stuck = {}
        node = self.rank - self.rank % PER_NODE
        for rank in range(node, node + PER_NODE) if self.fault == "dead" else [self.rank]:
            at = first(programs[rank], "mlp", 2)
            programs[rank][at] = elsewhere(programs[rank][at], ("read", "indexed_dataset.py", 41))
            stuck[rank] = at
        return {rank: op.stack for rank, (_, op) in stand(grid, programs, stuck).items()}

    def node(self, index: int) -> None:
        """The ranks of a node; in a child its watchdog. Does not return."""
        name, ranks = f"n{index:03d}", range(PER_NODE * index, PER_NODE * (index + 1))
        platform.node = lambda: name
        os.environ |= {"SLURM_JOB_ID": "77", "SLURM_NODEID": str(index)}
        clock, ahead_s = time.time, 3600.0 if index == 5 else 0.0
        time.time = lambda: clock() + ahead_s
        parent, beats = os.getpid(), {}
        for rank in ranks:
            beats[rank] = create_record(self.folder, os.environ, rank)
            beats[rank][:] = encode(0, "", time.time(), f"{parent} {name}".encode())
        if os.fork() == 0:
            self._watch(parent, index)
        self._train(beats, f"{parent} {name}".encode())

    def _watch(self, parent: int, index: int) -> None:
        die_with(parent, signal.SIGTERM)
        capture._dump_rank = self._dump_rank  # type: ignore[assignment]
        counts = (ctypes.c_double * len(FIELDS)).from_buffer(self.counts, 8 * len(FIELDS) * index)
        count_calls(self.folder, counts)
        watchdog.watch_node(self.folder, parent, PER_NODE * index)
        os._exit(0)

    def _dump_rank(self, folder: Path, stacks: Path, beat: Any, state: str) -> None:
        if state not in ("gone", "Z", "X"):
            (stacks / f"rank_{beat.rank}.txt").write_text(pyspy_text(self.stacks[beat.rank]))

    def _train(self, beats: dict[int, mmap.mmap], rest: bytes) -> None:
        """An iteration a second, until the fault; the faulty rank stops at once, the others within
        half a second.
        """
        number = 0
        while True:
            number += 1
            late_s = time.monotonic() - self.fault_at.value if self.fault_at.value else -1.0
            for rank, beat in beats.items():
                if (
                    late_s < 0
                    or (rank != self.rank and late_s < 0.5)
                    or (self.fault == "dead" and late_s < 0.5)
                ):
                    phase = "forward-compute" if number % 2 else "backward-compute"
                    beat[:] = encode(2 + number // 4, phase, time.time(), rest)
            if (
                self.fault == "exit"
                and self.rank in beats
                and late_s >= 0
                and b" 7777777 " not in beats[self.rank][:]
            ):
                gone = os.fork()
                if gone == 0:
                    os._exit(0)
                os.waitpid(gone, 0)
                beats[self.rank][:] = encode(
                    2 + number // 4,
                    "forward-compute",
                    time.time(),
                    b"%d %s" % (gone, rest.split()[1]),
                )
                beats.pop(self.rank)
            time.sleep(0.25)

    def run(self) -> None:
        """Start the nodes, count, plant the fault, wait for the verdict; prints what was found."""
        pids = []
        for index in range(self.nodes):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.setpgid(0, 0)
                try:
                    self.node(index)
                finally:
                    os._exit(1)
        try:
            self._observe(pids)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _observe(self, pids: list[int]) -> None:
        time.sleep(SETTLE_S)
        before, begin = list(self.counts), time.monotonic()
        time.sleep(COUNT_S)
        self._print_counts(
            [b - a for a, b in zip(before, self.counts, strict=True)], time.monotonic() - begin
        )
        size = (self.folder / "ranks/nodes/8.json").stat().st_size
        print(f"reports: {len(read_reports(self.folder))}, of {size} bytes")
        if self.fault == "none":
            return
        timeout_s, before = self.plan.run.hang_timeout_s, list(self.counts)
        self.fault_at.value = planted = time.monotonic()
        if self.fault == "dead":
            os.killpg(pids[self.rank // PER_NODE], signal.SIGKILL)
        while not (self.folder / "status.json").exists():
            time.sleep(0.1)
            if time.monotonic() - planted > timeout_s + 120:
                raise SystemExit("no verdict within 120 s of the time-out")
        delay_s, outcome = time.monotonic() - planted - timeout_s, read_status(self.folder)
        in_all = [sum(self.counts[i::4]) - sum(before[i::4]) for i in range(4)]
        print(
            f"{self.fault}: rank {self.rank} planted; verdict {delay_s:.1f} s after the time-out of {timeout_s:.0f} s"
        )
        print(f"status {outcome.status}, rank {outcome.rank}: {outcome.evidence}")
        stacks = [
            len(list(folder.glob("rank_*")))
            for folder in sorted((self.folder / "stacks").iterdir())
        ]
        print(
            f"stacks in each capture: {stacks}; from the fault on {in_all[0]:.0f} opens, {in_all[1]:.0f} other calls"
        )
        end = time.monotonic()
        while pids and time.monotonic() - end < 60:
            pids[:] = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.1)
        time.sleep(1.0)
        left = [path for path in heartbeat.BASE.glob("trilane-*") if path not in self.there]
        print(
            f"all but {len(pids)} nodes ended within {time.monotonic() - end:.1f} s; records left: {len(left)}"
        )

    def _print_counts(self, found: list[float], seconds: float) -> None:
        for i, name in enumerate(FIELDS):
            rates = [count / seconds for count in found[i::4]]
            rest = sorted(rates[1:])
            print(
                f"{name}/s: all {sum(rates):.1f}, a node {sum(rates) / len(rates):.3f}; "
                f"node of rank 0 {rates[0]:.2f}, the others {rest[0]:.3f} to {rest[-1]:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "fault", nargs="?", default="hang", choices=("hang", "dead", "exit", "none")
    )
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=150.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        Job(Path(place), options.nodes, options.timeout, options.fault).run()


if __name__ == "__main__":
    main()
