"""What follows when a run stops being useful, planted on a real SLURM: python benchmarks/responses.py

Each way has a run of its own on two of three nodes (the third is spare), a process a node, trained
by the megatron engine over gloo: a node dies, a rank is stopped, a rank gets an eighth of its time,
a node's products become NaN, the disk fills and empties, a node does not see the run folder.
Printed are the seconds from the plant to the verdict, from there to the next iteration, and the
nodes that left. docs/hangs.md has its result. It needs root, to hide a folder and to mount a small
disk.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from unittest import mock

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from slurm_cluster import REQUEST, SITE, Cluster, one_process_a_node, plan, started, submit
from support import wait_until

from trilane.slurm import client, jobs, script
from trilane.workspace import ledger, pace
from trilane.workspace.run import iteration
from trilane.workspace.status import known_status

WAIT_S = 300.0
DISK_BYTES = 24 << 20
# sitecustomize of a node that computes wrong results once a file is there
WRONG = """import os
with open("/proc/self/cmdline") as file:
    command = file.read()
if os.environ.get("SLURMD_NODENAME") == "jz-a100-2" and "trilane_engine" in command:
    import torch
    def wrong(function):
        def call(*arguments, **more):
            out = function(*arguments, **more)
            return out * float("nan") if os.path.exists({flag!r}) else out
        return call
    torch.mm = wrong(torch.mm)
    torch.matmul = wrong(torch.matmul)
    torch.nn.functional.linear = wrong(torch.nn.functional.linear)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a plant: seconds to the verdict and on to the next iteration, who left."""

    verdict_s: float
    again_s: float
    left: str
    wanted: str
    says: str

    def row(self, way: str) -> str:
        right = "yes" if self.left == self.wanted else f"no: {self.wanted or 'none'}"
        left = self.left or "none"
        return f"| {way} | {self.verdict_s:.0f} | {self.again_s:.0f} | {left} | {right} | {self.says} |"


class Trial:
    """A run on two nodes and a spare, submitted and training."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path, tests: bool = False) -> None:
        """With `tests` its nodes are tested, and the file `<folder>-wrong` makes one compute wrong
        results.
        """
        p = plan("run", data, nodes=2, iters=1_000_000, save_interval=100_000)
        p = one_process_a_node(replace(p, topology=replace(p.topology, dp=2)))
        p = replace(p, run=replace(p.run, hang_timeout_s=10.0))
        request = replace(REQUEST, spares=1, time_limit="01:00:00", preflight=tests)
        self.flag = folder.with_name(f"{folder.name}-wrong")
        site = SITE
        if tests:
            planted = folder.with_name(f"{folder.name}-planted")
            planted.mkdir()
            (planted / "sitecustomize.py").write_text(WRONG.format(flag=str(self.flag)))
            site = replace(SITE, setup=(f"export PYTHONPATH={planted}:$PYTHONPATH",))
        (self.folder,) = script.create({folder: p}, site, request)
        self.cluster = cluster
        self.job = ""

    def begin(self) -> None:
        self.job = submit(self.folder, SITE, REQUEST)
        wait_until(lambda: iteration(self.folder) > 30, WAIT_S, "training")

    def node(self, place: int) -> str:
        """The name of the node at that place of those that train."""
        return str(ledger.events(self.folder, "nodes")[-1]["chosen"][place])

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.info["cmdline"] or ())
                if "trilane_engine plan.json" in words and "torchrun" not in words:
                    env = process.environ()
                    if (env.get("RANK"), env.get("SLURM_JOB_ID")) == (str(rank), self.job):
                        return process
        raise LookupError(f"rank {rank}")

    def outcome(self, verdict: Callable[[], bool], wanted: str, begin: float) -> Outcome:
        """Wait for the verdict, and for an iteration of the next start."""
        wait_until(verdict, WAIT_S, f"verdict: {self.log()}")
        at = time.monotonic()
        wait_until(self._goes_on, WAIT_S, f"next start: {self.log()}")
        response = ledger.events(self.folder, "response")[-1]
        return Outcome(
            verdict_s=at - begin,
            again_s=time.monotonic() - at,
            left=",".join(response["nodes"]),
            wanted=wanted,
            says=response["says"],
        )

    def _goes_on(self) -> bool:
        starts = [path.stat().st_mtime for path in self.folder.glob("attempts/*")]
        steps = self.folder / "steps.jsonl"
        return (
            bool(starts) and iteration(self.folder) > 0 and steps.stat().st_mtime > max(starts) + 3
        )

    def log(self) -> str:
        return (self.folder / "run.log").read_text()[-2000:]

    def end(self) -> None:
        """Cancel it, and check that no iteration is missing or twice."""
        client.cancel([self.job])
        wait_until(lambda: client.states([self.job])[self.job].has_ended, 120, "end")
        numbers = []
        for line in (self.folder / "steps.jsonl").read_text().splitlines():
            numbers.append(json.loads(line)["iteration"])
        assert numbers == list(range(1, len(numbers) + 1)), "an iteration is missing or twice"
        assert len({event["id"] for event in ledger.events(self.folder, "started")}) == 1


def has_status(trial: Trial) -> Callable[[], bool]:
    return lambda: known_status(trial.folder) is not None


def dead(trial: Trial) -> Outcome:
    trial.begin()
    node = trial.node(1)
    trial.cluster.do("kill-node", node)
    return trial.outcome(has_status(trial), node, time.monotonic())


def frozen(trial: Trial) -> Outcome:
    trial.begin()
    node = trial.node(1)
    trial.rank(1).send_signal(signal.SIGSTOP)
    return trial.outcome(has_status(trial), node, time.monotonic())


def slow(trial: Trial) -> Outcome:
    """The rank runs an eighth of the time."""
    trial.begin()
    node = trial.node(1)
    process = trial.rank(1)
    begin = time.monotonic()

    def brake() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.35)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.05)

    threading.Thread(target=brake, daemon=True).start()
    return trial.outcome(lambda: bool(pace.slowness(trial.folder)[0]), node, begin)


def bursts(trial: Trial) -> Outcome:
    """Load of two seconds at all cores, every twenty, for a minute: nothing follows."""
    trial.begin()
    begin = time.monotonic()
    spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    said = ""
    while time.monotonic() - begin < 60:
        load = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(os.cpu_count() or 1)]
        for process in load:
            process.wait()
        said = said or pace.slowness(trial.folder)[0]
        time.sleep(18.0)
    left = [node for event in ledger.events(trial.folder, "response") for node in event["nodes"]]
    says = said or f"nothing, {iteration(trial.folder)} iterations"
    return Outcome(verdict_s=0.0, again_s=0.0, left=",".join(left), wanted="", says=says)


def unseen(trial: Trial) -> Outcome:
    """The node is left out before ranks start: the next iteration is the first."""
    node = "jz-a100-2"
    pid = int(
        (Path(trial.cluster.env["LOCAL_SLURM_DIR"]) / f"run/slurmd.{node}.pid")
        .read_text()
        .split()[0]
    )
    place = trial.folder.parent
    subprocess.run(
        ["nsenter", "-t", str(pid), "-m", "mount", "-t", "tmpfs", "none", place], check=True
    )
    begin = time.monotonic()
    try:
        trial.begin()
    finally:
        subprocess.run(["nsenter", "-t", str(pid), "-m", "umount", place], check=True)
    (choice,) = ledger.events(trial.folder, "nodes")
    return Outcome(
        verdict_s=0.0,
        again_s=time.monotonic() - begin,
        left=",".join(choice["left_out"]),
        wanted=node,
        says=next(iter(choice["left_out"].values()), ""),
    )


def wrong(trial: Trial) -> Outcome:
    """A node's products become NaN: the loss does, and the test of the nodes finds which."""
    trial.begin()
    begin = time.monotonic()
    trial.flag.touch()
    return trial.outcome(has_status(trial), "jz-a100-2", begin)


def full(trial: Trial) -> Outcome:
    """The disk fills and empties: nothing restarts, log and steps are whole."""
    trial.begin()
    begin = time.monotonic()
    filler = trial.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    wait_until(lambda: "DISK FULL" in jobs.job_status([trial.folder])[0].evidence, WAIT_S, "state")
    says = jobs.job_status([trial.folder])[0].evidence
    at = time.monotonic()
    time.sleep(10.0)
    (trial.folder / "save").touch()
    filler.unlink()
    size = (trial.folder / "run.log").stat().st_size
    wait_until(lambda: (trial.folder / "run.log").stat().st_size > size, WAIT_S, "log goes on")
    return Outcome(
        verdict_s=at - begin, again_s=time.monotonic() - at - 10, left="", wanted="", says=says
    )


WAYS = {
    "node dead": dead,
    "rank stopped": frozen,
    "rank 8 x slower": slow,
    "bursts of load": bursts,
    "wrong results": wrong,
    "folder unseen": unseen,
    "disk full": full,
}


@contextlib.contextmanager
def disk(place: Path) -> Iterator[None]:
    """A small disk at the place, which nodes that start later see."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    asked = parser.parse_args().ways
    root = Path(tempfile.mkdtemp(prefix="responses-"))
    print(f"{date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        "| planted | verdict after s | then again after s | left | right | line |\n|---|--:|--:|---|---|---|"
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(disk(root / "disk"))
            cluster = stack.enter_context(contextlib.contextmanager(started)())
            stack.enter_context(mock.patch.dict(os.environ, cluster.variables))
            for way in asked:
                cluster.clean()
                place = root / ("disk" if way == "disk full" else "runs")
                place.mkdir(exist_ok=True)
                run = place / way.replace(" ", "-")
                trial = Trial(cluster, run, root / "data", tests=way == "wrong results")
                outcome = WAYS[way](trial)
                trial.end()
                print(outcome.row(way), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
