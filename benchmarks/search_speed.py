"""How fast the search predicts: python benchmarks/search_speed.py

Two figures. `predicted` counts only topologies whose time and memory were really computed, on one
core; `looked at` also those that a rule refuses a block at a time. The space is that of 72 x 14336
on 384 GPUs, every GBS up to 2048.
"""

import resource
import time

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.costmodel import shipped
from trilane.planning.search import MEMORY_RULE, search_space
from trilane.planning.space import Space

STORED = Topology(precision="bf16", attention="scores")


def main() -> None:
    """Print both figures, the wall time and the peak memory of this process."""
    machine = cluster("jz-a100-80g")
    shape = parse_shape("72,14336,64,2048,250880")
    whole = Space(gpus=(384,), gbs=tuple(range(1, 2049)), fixed=STORED)
    dense = Space(gpus=tuple(range(8, 417, 8)), gbs=tuple(range(1, 2049)), fixed=STORED)
    # the files that ship are read before the clock runs
    search_space(shape, machine, Space(gpus=(8,), gbs=(8,), fixed=STORED), shipped.default(machine))
    for name, space in (("384 GPUs", whole), ("every node count", dense)):
        start, cpu = time.perf_counter(), time.process_time()
        found = search_space(shape, machine, space, shipped.default(machine), top=10)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        predicted = found.runnable + found.refused_by_rule.get(MEMORY_RULE, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: looked at {found.evaluated:,} topologies, {found.evaluated / cpu:,.0f} a second and core"
        )
        print(
            f"  predicted {predicted:,}, {predicted / cpu:,.0f} a second and core; {wall:.1f} s, {peak:.2f} GiB"
        )


if __name__ == "__main__":
    main()
