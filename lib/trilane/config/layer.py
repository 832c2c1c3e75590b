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
    """The class of a layer: `FILE.py:CLASS` with the file's text, or `package.module:CLASS`, which
    each node imports.

    name      as above
    source    the text of the file; "" for a module, which is installed wherever the plan is trained
    """

    name: str
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        ok = re.fullmatch(r"[\w.-]+:\w+", self.name) is not None
        ok = ok and (".py:" in self.name) == bool(self.source)
        rule = "must be FILE.py:CLASS with the text of the file, or package.module:CLASS"
        require(ok, "layer", self.name, rule)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        """The name, and for a file what tells two versions of it apart."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:8]
        if self.source:
            return f"{self.name} ({digest})"
        return self.name


def read_layer(name: str, folder: Path) -> Layer:
    """The layer `FILE.py:CLASS`, its file read from `folder` where its path is relative, or
    `package.module:CLASS`.
    """
    file, _, kind = name.rpartition(":")
    if not file.endswith(".py"):
        return Layer(name=name)
    source = read_text(folder / file, "layer", MOST_BYTES)
    return Layer(name=f"{Path(file).name}:{kind}", source=source)
