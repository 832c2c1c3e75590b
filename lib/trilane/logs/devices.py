"""The table of nvidia-smi: each GPU's name, memory in use and memory in all."""

import re
from dataclasses import dataclass

NAME = re.compile(
    rb"^\s*(?:\S+: ?)?\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|\s+[0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+"
)

USE = re.compile(rb"(\d+)MiB\s*/\s*(\d+)MiB")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as nvidia-smi shows it."""

    index: int
    name: str
    used_bytes: float
    total_bytes: float


class Devices:
    """Takes the lines of the table; a GPU takes two of them."""

    def __init__(self) -> None:
        self._named: tuple[int, str] | None = None

    @property
    def waits(self) -> bool:
        """Whether a GPU was named whose memory has not been seen."""
        return self._named is not None

    def device(self, line: bytes) -> Device | None:
        """The GPU that this line completes."""
        if found := NAME.match(line):
            self._named = int(found[1]), found[2].decode("utf-8", "replace")
        elif self._named and (use := USE.search(line)):
            (index, name), self._named = self._named, None
            used, total = (float(text) * 2**20 for text in use.groups())
            return Device(index=index, name=name, used_bytes=used, total_bytes=total)
        return None
