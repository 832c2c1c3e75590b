"""What a log prints about the hardware: the GPU table of nvidia-smi, and bandwidth benchmarks in bytes per second.

Benchmarks: all_reduce_bench in its two forms, and NVIDIA's nccl-tests.
"""

import re
from dataclasses import dataclass

from trilane.logs.table import NAN

GPU_NAME = re.compile(
    rb"^\s*(?:\S+: ?)?\|\s+(\d{1,6})\s+(\S(?:.{0,80}?\S)?)\s+(?:On|Off|N/A)\s+\|\s+"
    rb"[0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+"
)
GPU_LISTED = re.compile(rb"^\s*(?:\S+: ?)?GPU (\d{1,6}): (\S[^()]{0,80}?) \(UUID: ")  # nvidia-smi -L
GPU_MEMORY = re.compile(rb"(\d{1,15})MiB\s*/\s*(\d{1,15})MiB")
NUMBER = rb"(\d+(?:\.\d*)?)"
RANK = re.compile(rb"^\s*(\d+):\s*$")
DURATION = re.compile(rb"duration: " + NUMBER + rb" sec")
ALGORITHM = re.compile(rb"algo throughput: \d+(?:\.\d*)? bps, " + NUMBER + rb" Gbps")
BUS = re.compile(rb"busbw: " + NUMBER + rb"\s+Gbps")
NCCL_TEST = re.compile(
    rb"^\s*(\d+)\s+(\d+)\s+(?:float|half|bfloat16|double|u?int\d+|fp8\S*)\s+(?:\w+\s+)?-?\d+\s+"
    + rb"\s+".join([NUMBER] * 3)
)
NCCL_END = re.compile(rb"# Avg bus bandwidth\s*: " + NUMBER)
SUMMARY = re.compile(rb"average bandwidth of \w+")
BITS = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU in the table of nvidia-smi, or in its list, which has no memory (NaN)."""

    index: int
    name: str
    used_bytes: float
    total_bytes: float


class DeviceParser:
    """Parses nvidia-smi's table line by line; each GPU takes two lines."""

    def __init__(self) -> None:
        self.pending: tuple[int, str] | None = None  # a GPU that was named, whose memory line has not come yet

    def device(self, line: bytes) -> Device | None:
        """The GPU that this line completes, else None."""
        if found := GPU_NAME.match(line):
            self.pending = int(found[1]), found[2].decode("utf-8", "replace")
        elif found := GPU_LISTED.match(line):
            name = found[2].decode("utf-8", "replace")
            return Device(index=int(found[1]), name=name, used_bytes=NAN, total_bytes=NAN)
        elif self.pending and (use := GPU_MEMORY.search(line)):
            (index, name), self.pending = self.pending, None
            used, total = (float(text) * 2**20 for text in use.groups())
            return Device(index=index, name=name, used_bytes=used, total_bytes=total)
        return None


class BenchmarkParser:
    """Parses benchmark output line by line; all_reduce_bench spreads one trial of a rank over several lines.

    Rows have `rank`, `seconds`, `algorithm_bytes_per_s`, `bus_bytes_per_s`; those of nccl-tests `message_bytes` and no
    rank. Where trials of two ranks overlap, a line has no certain rank: it is NaN, and a row holds adjacent numbers.
    """

    def __init__(self) -> None:
        self._ranks: list[float] = []
        self._partial: dict[str, float] = {}
        self._mixed = False
        self.matched = False  # whether the last line belonged to a benchmark

    def row(self, line: bytes) -> dict[str, float] | None:
        """The row that this line completes, else None."""
        self.matched = True
        if found := NCCL_TEST.match(line):
            size, seconds, algorithm, bus = (float(found[i]) for i in (1, 3, 4, 5))
            rates = {"algorithm_bytes_per_s": algorithm * 1e9, "bus_bytes_per_s": bus * 1e9}
            return {"message_bytes": size, "seconds": seconds / 1e6, **rates}
        if found := RANK.match(line):
            self._mixed = bool(self._ranks)
            self._ranks.append(float(found[1]))
        elif found := DURATION.search(line):
            self._partial["seconds"] = float(found[1])
        elif found := ALGORITHM.search(line):
            self._partial["algorithm_bytes_per_s"] = float(found[1]) * BITS
        elif found := BUS.search(line):
            row = {**self._partial, "bus_bytes_per_s": float(found[1]) * BITS}
            self._partial = {}
            row["rank"] = NAN if self._mixed or not self._ranks else self._ranks[0]
            del self._ranks[:1]
            self._mixed = self._mixed and bool(self._ranks)
            return row
        else:
            self.matched = False
        return None


def benchmark_finished(line: bytes) -> bool:
    """Whether the line is the summary that a benchmark prints last."""
    return bool(NCCL_END.search(line) or SUMMARY.search(line))
