"""A transformer layer of one's own, as a plan holds it: a class, and the text of its file."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from trilane.utils.validation import read_text, require

STANDARD = "megatron-core's"  # as a checkpoint names the layer of a plan without one
MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The class of a layer: `FILE.py:CLASS`, and the file's text, which each node runs."""

    name: str
    source: str = field(repr=False)

    def __post_init__(self) -> None:
        ok = re.fullmatch(r"[\w.-]+\.py:\w+", self.name) is not None
        require(ok, "layer", self.name, "must be FILE.py:CLASS with the text of the file")

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        """The name, and what tells two versions of the file apart."""
        return f"{self.name} ({hashlib.sha256(self.source.encode()).hexdigest()[:8]})"


def read_layer(name: str, folder: Path) -> Layer:
    """The layer `FILE.py:CLASS`, its file read from `folder` where its path is relative."""
    file, _, kind = name.rpartition(":")
    source = read_text(folder / file, "layer", MOST_BYTES)
    return Layer(name=f"{Path(file).name}:{kind}", source=source)
