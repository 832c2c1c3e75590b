"""Bandwidth benches: all_reduce_bench in its two forms, and NVIDIA's nccl-tests. Rates in bytes per second."""

import re

from trilane.logs.table import NAN

NUMBER = rb"(\d+\.?\d*)"
RANK = re.compile(rb"^\s*(\d+):\s*$")
DURATION = re.compile(rb"duration: " + NUMBER + rb" sec")
ALGORITHM = re.compile(rb"algo throughput: \d+\.?\d* bps, " + NUMBER + rb" Gbps")
BUS = re.compile(rb"busbw: " + NUMBER + rb"\s+Gbps")

NCCL_TEST = re.compile(
    rb"^\s*(\d+)\s+(\d+)\s+(?:float|half|bfloat16|double|u?int\d+|fp8\S*)\s+(?:\w+\s+)?-?\d+\s+"
    + rb"\s+".join([NUMBER] * 3)
)

NCCL_END = re.compile(rb"# Avg bus bandwidth\s*: " + NUMBER)
SUMMARY = re.compile(rb"average bandwidth of \w+")
BITS = 1e9 / 8


class Bench:
    """Takes the lines of all_reduce_bench, which spreads a trial of a rank over several, and makes rows of them.

    Rows with `rank`, `seconds`, `algorithm_bytes_per_s`, `bus_bytes_per_s`; those of nccl-tests have `message_bytes`
    and no rank. Ranks write at the same time: where two trials overlap nobody can say whose line is whose, so the rank
    is NaN, and the numbers of a row are those that came next to each other.
    """

    def __init__(self) -> None:
        self._ranks: list[float] = []
        self._open: dict[str, float] = {}
        self._mixed = False
        self.took = False  # whether the last line was one of a bench

    def row(self, line: bytes) -> dict[str, float] | None:
        """A finished row, where this line finishes one."""
        self.took = True
        if found := NCCL_TEST.match(line):
            algorithm, bus = float(found[4]) * 1e9, float(found[5]) * 1e9
            return {
                "message_bytes": float(found[1]),
                "seconds": float(found[3]) / 1e6,
                "algorithm_bytes_per_s": algorithm,
                "bus_bytes_per_s": bus,
            }
        if found := RANK.match(line):
            self._mixed = bool(self._ranks)
            self._ranks.append(float(found[1]))
        elif found := DURATION.search(line):
            self._open["seconds"] = float(found[1])
        elif found := ALGORITHM.search(line):
            self._open["algorithm_bytes_per_s"] = float(found[1]) * BITS
        elif found := BUS.search(line):
            row = {**self._open, "bus_bytes_per_s": float(found[1]) * BITS}
            self._open = {}
            row["rank"] = NAN if self._mixed or not self._ranks else self._ranks[0]
            del self._ranks[:1]
            self._mixed = self._mixed and bool(self._ranks)
            return row
        else:
            self.took = False
        return None


def ends(line: bytes) -> bool:
    """Whether the bench says that it is through."""
    return bool(NCCL_END.search(line) or SUMMARY.search(line))
