"""What a log prints about the hardware: the GPU table of nvidia-smi."""

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
                return Device(index=index, name=name, total_bytes=NAN)
            self.pending = index, name
        elif self.pending and (use := re.search(rb"\dMiB\s*/\s*(\d{1,15})MiB", line)):
            (index, name), self.pending = self.pending, None
            return Device(index=index, name=name, total_bytes=float(use[1]) * 2**20)
        return None
