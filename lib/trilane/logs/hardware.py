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


def benchmark(line: bytes) -> dict[str, float]:
    """The rates in bytes per second on a line of a benchmark, of nccl-tests with seconds and bytes of the message; {}
    for another line."""
    if b"busbw: " in line and (found := re.search(rb"busbw: (\d+(?:\.\d*)?)\s+Gbps", line)):
        return {"bus_bytes_per_s": float(found[1]) * 1e9 / 8}
    kinds = rb"(?:float|half|bfloat16|double|u?int\d+|fp8\S*)"
    number = rb"\s+(\d+(?:\.\d*)?)"
    found = re.match(rb"\s*(\d+)\s+\d+\s+" + kinds + rb"\s+(?:\w+\s+)?-?\d+" + 3 * number, line)
    size, seconds, algorithm, bus = map(float, found.groups()) if found else (0.0,) * 4
    rates = {"algorithm_bytes_per_s": algorithm * 1e9, "bus_bytes_per_s": bus * 1e9}
    return {"message_bytes": size, "seconds": seconds / 1e6, **rates} if found else {}


def benchmark_finished(line: bytes) -> bool:
    """Whether the line is the summary that a benchmark prints last."""
    return bool(re.search(rb"# Avg bus bandwidth\s*: \d|average bandwidth of \w+", line))
