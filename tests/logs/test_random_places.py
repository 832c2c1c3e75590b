"""Logs of 16 to 1,024 ranks made at random, of which the rank and the node at fault are known: none
is named wrongly.

Lines in the form of those of torch's ProcessGroupNCCL.cpp and elastic/multiprocessing, NCCL's
init.cc, SLURM's srun, DeepSpeed's launch.py and Open MPI's prterun, with numbers of our own.
TRILANE_RANDOM_LOGS is the number of logs.
"""

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from test_log_dialects import m2021

from trilane.logs.run import read_log

HOSTS = "gpu{:02} rank{} jean-zay-iam{} r1i{}n3 node-{}.site.org default{} worker-{} a{}b n0{}"
FAULTS = {
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "GPU error",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.": "OOM",
    "ValueError: heads": "crashed",
    "AssertionError: Rank {r}: found NaN in local grad norm for bucket #0": "NaN loss",
    "{n}:81:99 [{g}] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error": "network",
    "": "killed",
}
PEER = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited",
    "RuntimeError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from rank 0 failed, NCCL error",
    "[E ProcessGroupNCCL.cpp:616] [PG ID 5 PG GUID 37(TP) Rank 2] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600038 milliseconds",
)
# torch 1.13, which counts in a group that it does not name
OLD = "[Rank {g}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600038 ms"


@dataclass
class Job:
    """A job that one rank ends: its launcher, the prefix of a line, and which ranks printed each
    line.
    """

    rng: random.Random
    text: list[str] = field(default_factory=lambda: list(map(m2021, range(1, 6))))
    owners: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        rng = self.rng
        self.width, nodes = rng.choice(
            ((8, 2), (4, 4), (8, 2 << rng.randrange(7)), (4, 4 << rng.randrange(5)), (2, 8))
        )
        self.world = self.width * nodes
        style, numbers = rng.choice(HOSTS.split()), rng.sample(range(1, 300), nodes)
        self.hosts = [style.format(n) for n in (sorted(numbers) if rng.random() < 0.5 else numbers)]
        self.launcher = rng.choice(["srun", "torchrun", "deepspeed", "mpirun"])
        self.has_rank, self.prefix = rng.random() < 0.6, rng.choice(["label", "own", "none"])
        self.guilty = rng.randrange(self.world)
        self.fault, self.status = rng.choice([*FAULTS.items()])
        self.text += [
            f"using world size: {self.world}, tensor-model-parallel size: {self.width}\n"
        ] * rng.randrange(2)
        self.text += rng.choice(
            [
                [],
                [],
                [*self.nccl(self.world, 1)],
                [*self.nccl(self.width, 0)],
                [*self.nccl(len(self.hosts), 2)],
            ]
        )

    def node(self, rank: int) -> str:
        return self.hosts[rank // self.width]

    def nccl(self, size: int, kind: int) -> Iterator[str]:
        """NCCL's lines of the run's communicator, of each node's or of one of a rank on each node,
        some of them.
        """
        for rank in self.rng.sample(range(self.world), min(self.world, self.rng.choice([3, 2000]))):
            number = (rank % self.width, rank, rank // self.width)[kind]
            line = f"[{rank % self.width}] NCCL INFO comm 0x5 rank {number} nranks {size} cudaDev {rank % self.width} busId 1b"
            yield f"{self.before(rank)}{self.node(rank).partition('.')[0]}:81:99 {line} - Init COMPLETE\n"

    def before(self, rank: int) -> str:
        """What stands before a line of that rank."""
        number, node = rank % self.width, rank // self.width
        own = {
            "torchrun": f"[default{number}]:",
            "deepspeed": f"{self.node(rank)}: ",
            "mpirun": f"[1,{rank}]<stderr>:",
        }
        label = (
            f"{rank if self.launcher == 'srun' else node}: "
            if self.launcher in ("srun", "torchrun")
            else ""
        )
        first = {"label": label, "own": own.get(self.launcher, ""), "none": ""}[self.prefix]
        return first + f"[rank{rank}]: " * self.has_rank

    def say(self, rank: int, text: str) -> None:
        line = self.before(rank) + text.format(r=rank, n=self.node(rank), g=rank % self.width)
        self.owners[line.strip()].add(rank)
        self.text.append(line + "\n")

    def table(self, node: int, at: int) -> None:
        """torchrun's table of failures on a node, of its rank that failed first and another one."""
        first = (
            self.guilty
            if node == self.guilty // self.width
            else node * self.width + self.rng.randrange(self.width)
        )
        self.text.append(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nFailures:\n"
        )
        other = first ^ 1
        for rank in (other, first):
            self.text += ["Root Cause (first observed failure):\n"] * (rank == first)
            self.text.append(
                f"[0]:\n  time      : 2026-08-01_12:00:{at + (rank == other):02}\n  host      : {self.node(rank)}\n"
            )
            code = (
                f"exitcode  : {-9 if rank == self.guilty and not self.fault else 1} (pid: {rank})"
            )
            self.owners[code].add(rank)
            self.text.append(
                f"  rank      : {rank} (local_rank: {rank % self.width})\n  {code}\n  error_file: <N/A>\n"
            )

    def launchers(self) -> None:
        """What the launchers print after it, of some of the nodes."""
        seen = self.rng.sample(range(len(self.hosts)), self.rng.randint(1, len(self.hosts)))
        for at, node in enumerate(seen[:20]):
            if self.launcher == "torchrun":
                self.text.append(
                    "W1120 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 9 closing signal SIGTERM\n"
                )
                if self.rng.random() < 0.7:
                    self.table(node, 1 if node == self.guilty // self.width else 2 + at)
            rank = node * self.width + self.rng.randrange(self.width)
            tasks = {"srun": f"task {rank}", "torchrun": f"task {node}"}.get(self.launcher)
            if self.launcher == "srun" and self.rng.random() < 0.3:
                tasks = f"tasks {node * self.width}-{node * self.width + self.width - 1}"
            if tasks:
                line = f"srun: error: {self.hosts[node].partition('.')[0]}: {tasks}: Exited with exit code 1"
                self.owners[line] = (
                    {rank} if tasks == f"task {rank}" and self.launcher == "srun" else set()
                )
                self.text.append(line + "\n")
            if self.launcher == "deepspeed":
                self.text.append(
                    f"{self.hosts[node]}: [INFO] [launch.py:316:sigkill_handler] Killing subprocess 12\n"
                )
        if self.launcher == "mpirun" and self.rng.random() < 0.7:
            how = f"with PID 0 on node {self.node(self.guilty)} exited on signal 9 (Killed)."
            self.owners[line := f"mpirun noticed that process rank {self.guilty} {how}"].add(
                self.guilty
            )
            self.text.append(line + "\n")

    def written(self) -> str:
        """The log: the fault among what other ranks print because of it."""
        rng = self.rng
        if self.launcher == "deepspeed":
            ranks = ", ".join(
                f"'{h}': [{', '.join(str(i * self.width + k) for k in range(self.width))}]"
                for i, h in enumerate(self.hosts)
            )
            self.text.append(
                f"{self.hosts[0]}: [INFO] [launch.py:153:main] global_rank_mapping=defaultdict(<class 'list'>, {{{ranks}}})\n"
            )
        is_old = not self.has_rank and "using world size" in "".join(self.text)
        kinds = (*PEER, OLD) if is_old else PEER
        said = [
            (rank, rng.choice(kinds))
            for rank in rng.sample(range(self.world), rng.randrange(8))
            if rank != self.guilty
        ]
        said += [(self.guilty, self.fault)] * bool(self.fault)
        for rank, text in rng.sample(said, len(said)):
            self.say(rank, text)
        self.launchers()
        return "".join(self.text)


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Counter[str]:
    """How many of the logs name the rank and the node rightly, wrongly or not at all."""
    found, path = Counter[str](), tmp_path_factory.mktemp("logs") / "a.log"
    for seed in range(int(os.environ.get("TRILANE_RANDOM_LOGS", "200"))):
        job = Job(random.Random(seed))
        path.write_text(job.written())
        os.utime(path, (0, 0))
        log = read_log(path)
        excluded = job.node(job.guilty).partition(".")[0]
        is_owner = not job.fault and job.owners.get(log.evidence) == {
            log.rank
        }  # without a line of the first to fail
        rank = "right rank" if log.rank == job.guilty or is_owner else f"seed {seed} wrong rank"
        rank = "no rank" if log.rank is None else rank
        node = {"": "no node", excluded: "right node"}.get(log.exclude, f"seed {seed} healthy node")
        found.update([rank, node, f"{job.launcher}: {rank}", f"{job.launcher}: {node}"])
    return found


def test_no_rank_is_named_wrongly_and_no_healthy_node_is_excluded(judged):
    assert not [name for name in judged if "wrong" in name or "healthy" in name], judged


def test_what_a_log_proves_is_named(judged):
    total = judged["right rank"] + judged["no rank"]
    assert judged["right rank"] > 0.6 * total and judged["right node"] > 0.1 * total, judged
