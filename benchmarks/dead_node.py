"""What a dead node costs a job of 16, 128 and 1,024 nodes: the table in docs/slurm.md.

`PYTHONPATH=lib python benchmarks/dead_node.py [--seconds 55]`. Measured here: the probe of so many
nodes, one of them dead, against a listener on the loopback and a stand-in of scontrol. From tests
on SLURM: `--seconds`, kill to next iteration. Computed: the rest. Left out: the iterations since
the last save, which a run chooses by its save_interval, and that torch starts later the more nodes
there are.
"""

import argparse
import os
import socket
import tempfile
import time
from pathlib import Path

from trilane_diagnose.nodes import unreachable

GPUS = 8  # of a node
OPENS_PER_S = (
    0.25  # a node's on the shared file system: benchmarks/heartbeat_cluster.py, 1,024 ranks
)
BEFORE_S = 205  # four ranks and a spare, when srun waited for 60 s and all nodes were tested again
# with slurmctld's limit of requests (rl_enable; rl_refill_rate is 2 by default), one step a node
SRUNS_PER_S = 2


def probe_s(count: int, port: int, scontrol: Path) -> float:
    """Seconds until of `count` nodes the one is found that takes no connection."""
    names = [f"n{i}" for i in range(count)]
    lines = [
        f"NodeName={name} NodeAddr=127.0.1.{1 + i % 250} Port={port} x"
        for i, name in enumerate(names)
    ]
    lines[-1] = lines[-1].replace(f"Port={port}", "Port=1")
    (scontrol.parent / "nodes").write_text("\n".join(lines))
    scontrol.write_text(
        f'#!/bin/sh\n[ "$2" = config ] && echo " SlurmdPort = {port} " || cat {scontrol.parent}/nodes\n'
    )
    scontrol.chmod(0o755)
    begin = time.monotonic()
    assert unreachable(names) == names[-1:]
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=55.0)
    seconds = parser.parse_args().seconds
    print(
        "| nodes | opens a second | probe of all (s) | sruns of a start | GPU-hours of a death |\n|---|---|---|---|---|"
    )
    with (
        tempfile.TemporaryDirectory() as place,
        socket.create_server(("", 0), backlog=4096) as slurmd,
    ):
        os.environ["PATH"] = f"{place}:{os.environ['PATH']}"
        for nodes in (16, 128, 1024):
            probe = probe_s(nodes, slurmd.getsockname()[1], Path(place) / "scontrol")
            # the test's step, the guard's and the training's; before a step for each node and pair
            sruns, hours = (
                (3, int(1.5 * nodes) + 2),
                [GPUS * nodes * s / 3600 for s in (seconds, BEFORE_S)],
            )
            row = f"{OPENS_PER_S * nodes:.0f} | {probe:.1f} ({nodes / SRUNS_PER_S:.0f}) | {sruns[0]} ({sruns[1]:,})"
            print(f"| {nodes:,} | {row} | {hours[0]:.1f} ({hours[1]:.1f}) |")


if __name__ == "__main__":
    main()
