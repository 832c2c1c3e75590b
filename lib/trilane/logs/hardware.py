"""What a log prints about the hardware: the GPU table of nvidia-smi, and bandwidth benchmarks in bytes per second.

Benchmarks: all_reduce_bench in its two forms, and NVIDIA's nccl-tests.
"""

import re
from dataclasses import dataclass

from trilane.logs.table import NAN

GPU = re.compile(
    rb"^\s*(?:\S+: ?)?(?:"
    rb"\|\s+(\d{1,6})\s+(\S(?:.{0,80}?\S)?)\s+(?:On|Off|N/A)\s+\|\s+[\dA-Fa-f]+:[\dA-Fa-f]+:[\dA-Fa-f.]+"
    rb"|GPU (\d{1,6}): (\S[^()]{0,80}?) \(UUID: )"  # nvidia-smi -L
)
NUMBER = rb"(\d+(?:\.\d*)?)"
NCCL_TEST = re.compile(
    rb"^\s*(\d+)\s+(\d+)\s+(?:float|half|bfloat16|double|u?int\d+|fp8\S*)\s+(?:\w+\s+)?-?\d+\s+"
    + rb"\s+".join([NUMBER] * 3)
)
BENCH = re.compile(  # a line each of all_reduce_bench, in Gbit/s
    rb"^\s*(\d+):\s*$|duration: N sec|algo throughput: \d+(?:\.\d*)? bps, N Gbps|busbw: N\s+Gbps".replace(b"N", NUMBER)
)


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
        if found := GPU.match(line):
            index, name = int(found[1] or found[3]), (found[2] or found[4]).decode("utf-8", "replace")
            if found[3]:
                return Device(index=index, name=name, used_bytes=NAN, total_bytes=NAN)
            self.pending = index, name
        elif self.pending and (use := re.search(rb"(\d{1,15})MiB\s*/\s*(\d{1,15})MiB", line)):
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
        tested, bench = NCCL_TEST.match(line), BENCH.search(line)
        self.matched = bool(tested or bench)
        if tested:
            size, seconds, algorithm, bus = (float(tested[i]) for i in (1, 3, 4, 5))
            rates = {"algorithm_bytes_per_s": algorithm * 1e9, "bus_bytes_per_s": bus * 1e9}
            return {"message_bytes": size, "seconds": seconds / 1e6, **rates}
        if not bench:
            return None
        value = float(bench[bench.lastindex or 0])
        if bench[1]:
            self._mixed = bool(self._ranks)
            self._ranks.append(value)
            return None
        name = {2: "seconds", 3: "algorithm_bytes_per_s", 4: "bus_bytes_per_s"}[bench.lastindex or 0]
        self._partial[name] = value if bench[2] else value * 1e9 / 8
        if not bench[4]:
            return None
        row, self._partial = self._partial, {}
        row["rank"] = NAN if self._mixed or not self._ranks else self._ranks[0]
        del self._ranks[:1]
        self._mixed = self._mixed and bool(self._ranks)
        return row


def benchmark_finished(line: bytes) -> bool:
    """Whether the line is the summary that a benchmark prints last."""
    return bool(re.search(rb"# Avg bus bandwidth\s*: \d|average bandwidth of \w+", line))
