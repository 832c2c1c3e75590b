"""A transformer layer of one's own, as a plan holds it: a class by name, with the text of its file."""

import ast
import hashlib
import inspect
import linecache
import re
from dataclasses import dataclass, field
from pathlib import Path

from trilane.utils.validation import read_text, require

STANDARD = "megatron-core's"  # as a checkpoint names the layer of a plan without one


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The class of a layer: `FILE.py:CLASS` with the file's text, or `package.module:CLASS`, which each node imports.

    name      as above
    source    the text of the file; "" for a module, which is installed wherever the plan is trained
    """

    name: str
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        is_file = re.fullmatch(r"[\w.-]+\.py:\w+", self.name) is not None
        ok = is_file or re.fullmatch(r"\w+(\.\w+)*:\w+", self.name) is not None
        require(ok, "layer", self.name, "must be FILE.py:CLASS or package.module:CLASS")
        rule = 'needs the text of its file; "layer": "FILE.py:CLASS" in a plan takes it from the plan\'s folder'
        require(is_file == bool(self.source), "layer", self.name, rule if is_file else "a module has no source here")

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        """The name, and for a file what tells two versions of it apart."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:8]
        return f"{self.name} ({digest})" if self.source else self.name


def read_layer(name: str, folder: Path) -> Layer:
    """The layer `FILE.py:CLASS`, its file read from `folder` where its path is relative, or `package.module:CLASS`."""
    file, _, kind = name.rpartition(":")
    if not file.endswith(".py"):
        return Layer(name=name)
    return Layer(name=f"{Path(file).name}:{kind}", source=read_text(folder / file, "layer", 1 << 20))


def layer_of(layer: str | type) -> Layer:
    """The layer of a class, also of one that a notebook's cell defines, or of a name as in read_layer().

    Of a cell, or of the script that runs, its imports, functions, classes and constants are kept, and no call.
    """
    if isinstance(layer, str):
        return read_layer(layer, Path.cwd())
    require(isinstance(layer, type), "layer", layer, "must be a class, FILE.py:CLASS or package.module:CLASS")
    home = layer.__module__
    if "." in home:
        return Layer(name=f"{home}:{layer.__name__}")
    if home != "__main__":  # of the current folder, perhaps, in which no other process looks for modules
        return read_layer(f"{inspect.getfile(layer)}:{layer.__name__}", Path.cwd())
    # inspect has no source of a class of a cell, but the functions in it know where they were compiled
    files = [made.__code__.co_filename for made in vars(layer).values() if inspect.isfunction(made)]
    text = "".join(linecache.getlines(files[0])) if files else ""
    rule = "has no source here; write it to a file (%%writefile layer.py), and give layer.py:CLASS"
    require(f"class {layer.__name__}" in text, "layer", layer.__name__, rule)
    return Layer(name=f"cell.py:{layer.__name__}", source=_definitions(text))


def _definitions(text: str) -> str:
    """The imports, functions, classes and constants at the top level of a Python text."""
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    return "".join(
        f"{ast.unparse(node)}\n"
        for node in ast.parse(text).body
        if isinstance(node, kept) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    )
