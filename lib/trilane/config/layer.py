"""A transformer layer of one's own, as a plan holds it: a class, and the text of its file."""

import inspect
import linecache
import re
from dataclasses import field
from pathlib import Path

from trilane.utils.files import hash_of
from trilane.utils.frozen import frozen
from trilane.utils.validation import read_text, require

STANDARD = "megatron-core's"  # as a checkpoint names the layer of a plan without one
MOST_BYTES = 1 << 20


@frozen
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
        return f"{self.name} ({hash_of(self.source, 8)})"


def read_layer(name: str, folder: Path) -> Layer:
    """The layer `FILE.py:CLASS`, its file read from `folder` where its path is relative."""
    file, _, kind = name.rpartition(":")
    source = read_text(folder / file, "layer", MOST_BYTES)
    return Layer(name=f"{Path(file).name}:{kind}", source=source)


def layer_of(layer: str | type) -> Layer:
    """The layer of a class, or of `FILE.py:CLASS` in the current folder.

    The text of a class is that of its file or of its notebook cell, whole: each process runs it.
    ValueError for a class without a text.
    """
    if isinstance(layer, str):
        return read_layer(layer, Path.cwd())
    functions = filter(inspect.isfunction, vars(layer).values())
    files = [inspect.unwrap(function).__code__.co_filename for function in functions]
    # IPython keeps the text of each cell by a name of its own
    text = "".join(linecache.getlines(files[0])) if files else ""
    rule = "is in no file; write it to one (%%writefile layer.py), and give layer.py:CLASS"
    require(bool(text), "layer", layer.__name__, rule)
    name = "cell.py" if layer.__module__ == "__main__" else Path(files[0]).name
    return Layer(name=f"{name}:{layer.__name__}", source=text)
