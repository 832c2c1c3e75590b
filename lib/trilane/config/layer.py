"""A transformer layer of one's own, as a plan holds it: a class by name, with the text of its file."""

import hashlib
import inspect
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
        form = r"[\w.-]+\.py:\w+" if self.source else r"\w+(\.\w+)*:\w+"
        ok = re.fullmatch(form, self.name) is not None
        rule = "must be FILE.py:CLASS with the text of the file, or package.module:CLASS"
        require(ok and (bool(self.source) or ".py:" not in self.name), "layer", self.name, rule)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        """The name, and for a file what tells two versions of it apart."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:8]
        return f"{self.name} ({digest})" if self.source else self.name


def read_layer(name: str, folder: Path) -> Layer:
    """The layer `FILE.py:CLASS`, its file read from `folder` where its path is relative, or
    `package.module:CLASS`.
    """
    file, _, kind = name.rpartition(":")
    if not file.endswith(".py"):
        return Layer(name=name)
    source = read_text(folder / file, "layer", MOST_BYTES)
    return Layer(name=f"{Path(file).name}:{kind}", source=source)


def layer_of(layer: str | type) -> Layer:
    """The layer of a class, or of a name as in read_layer(). ValueError for a class of a notebook's
    cell, which has no file.
    """
    if isinstance(layer, str):
        return read_layer(layer, Path.cwd())
    home = layer.__module__
    if "." in home:
        return Layer(name=f"{home}:{layer.__name__}")
    try:  # of a file of the current folder, in which no other process looks for modules
        inspect.getsource(layer)
    except (OSError, TypeError):
        rule = "is in no file; write it to one (%%writefile layer.py), and give layer.py:CLASS"
        raise ValueError(f"layer={layer.__name__}: {rule}") from None
    return read_layer(f"{inspect.getfile(layer)}:{layer.__name__}", Path.cwd())
