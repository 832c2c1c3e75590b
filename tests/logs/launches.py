"""Logs of launches made at random, of which the rank that failed and its node are known."""

import random
from dataclasses import dataclass, field

FAULTS = (
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "AssertionError: heads of rank 0 differ",
)
PEER = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or a network error"
HOSTS = ("gpu{}", "r{}i2n3", "node-{}", "rank{}", "jean-zay-iam{}", "n{:04}.site.org", "task{}", "w{}x")
TABLE = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{bar}\npretrain_gpt.py FAILED\n{bar}\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-08-01_12:00:00\n  host      : {host}\n"
    "  rank      : {rank} (local_rank: {local})\n  exitcode  : 1 (pid: 77)\n  error_file: <N/A>\n{bar}\n"
)


@dataclass
class Launch:
    """A log's `text`, in which `rank` on `node` failed first, launched by `launcher`."""

    launcher: str
    rank: int
    node: str
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def launch(seed: int) -> Launch:
    """The launch of that number: 16 to 1,024 ranks on nodes of 4 or 8 GPUs."""
    draw = random.Random(seed)
    width, world = draw.choice((4, 8)), draw.choice((16, 32, 64, 128, 256, 512, 1024))
    numbers = sorted(draw.sample(range(1, world // width + 9), world // width))
    name = draw.choice(HOSTS)
    hosts = [name.format(n) for n in numbers]
    rank = draw.randrange(world)
    made = Launch(draw.choice(("srun", "torchrun", "deepspeed", "mpirun")), rank, hosts[rank // width])
    shows = {
        what: draw.random() < 0.5 for what in ("label", "default", "rank", "map", "world", "table", "groups", "exits")
    }
    peers = [peer for peer in draw.sample(range(world), 6) if peer != rank]

    def said(by: int, text: str) -> str:
        """What rank `by` prints, as the launcher puts it into the log."""
        text = f"[rank{by}]: {text}" if shows["rank"] else text
        if made.launcher == "torchrun":
            text = f"[default{by % width}]:{text}" if shows["default"] else text
        if made.launcher in ("srun", "torchrun") and shows["label"]:
            return f"{by if made.launcher == 'srun' else by // width}: {text}"
        if made.launcher == "deepspeed":
            return f"{hosts[by // width]}: {text}" if shows["label"] else text
        return f"[1,{by}]<stderr>:{text}" if made.launcher == "mpirun" and shows["label"] else text

    def communicator(of: int, number: int, size: int) -> str:
        place = f"{hosts[of // width].partition('.')[0]}:81:99 [{of % width}]"
        return (
            f"{place} NCCL INFO comm 0x55d rank {number} nranks {size} cudaDev {of % width} busId 1b000 - Init COMPLETE"
        )

    made.lines += [f"using world size: {world}, data-parallel-size: {world}"] * shows["world"]
    if shows["map"]:
        made.lines += [communicator(r, r, world) for r in range(world)]
        made.lines += [communicator(r, r // width, world // width) for r in peers]
    elif shows["groups"]:
        made.lines += [said(r, communicator(r, r // width, world // width)) for r in (*peers, rank)]
    made.lines += [said(peer, PEER) for peer in peers[:1]]
    trace = ("Traceback (most recent call last):", '  File "pretrain_gpt.py", line 7, in forward', draw.choice(FAULTS))
    made.lines += [said(rank, line) for line in trace]
    if shows["groups"]:
        watchdog = "[PG 1 Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800 ms"
        made.lines += [said(peer, watchdog.format(peer // width)) for peer in peers]
    made.lines += [said(peer, PEER) for peer in peers[1:]]
    table = TABLE.format(bar="=" * 60, host=made.node, rank=rank, local=rank % width)
    made.lines += table.splitlines() if made.launcher == "torchrun" and shows["table"] else []
    # the first that srun sees end may be one that lost its peer
    order = sorted({p // width for p in (*peers, rank)}, key=lambda _: draw.random())
    for node in order if shows["exits"] and made.launcher in ("srun", "torchrun") else ():
        tasks = [p for p in (*peers, rank) if p // width == node] if made.launcher == "srun" else [node]
        for task in tasks:
            made.lines.append(f"srun: error: {hosts[node].partition('.')[0]}: task {task}: Exited with exit code 1")
    if made.launcher == "mpirun" and shows["exits"]:
        made.lines.append(
            f"mpirun noticed that process rank {rank} with PID 77 on node {made.node} exited on signal 6."
        )
    return made
