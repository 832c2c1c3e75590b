"""A transformer layer of one's own, as a plan holds it: a class by name, with the text of its file."""

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import symtable
from dataclasses import dataclass, field
from pathlib import Path

from trilane.utils.validation import read_text, require

STANDARD = "megatron-core's"  # as a checkpoint names the layer of a plan without one


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
        is_file = re.fullmatch(r"[\w.-]+\.py:\w+", self.name) is not None
        ok = is_file or re.fullmatch(r"\w+(\.\w+)*:\w+", self.name) is not None
        require(ok, "layer", self.name, "must be FILE.py:CLASS or package.module:CLASS")
        rule = 'needs the text of its file; "layer": "FILE.py:CLASS" in a plan takes it from the plan\'s folder'
        require(
            is_file == bool(self.source),
            "layer",
            self.name,
            rule if is_file else "a module has no source here",
        )

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
    return Layer(
        name=f"{Path(file).name}:{kind}", source=read_text(folder / file, "layer", 1 << 20)
    )


def layer_of(layer: str | type) -> Layer:
    """The layer of a class, also of one that a notebook's cell defines, or of a name as in
    read_layer().

    Of a cell, or of the script that runs, what the class uses is kept: imports, functions, classes
    and constants. ValueError names what it uses of other cells.
    """
    if isinstance(layer, str):
        return read_layer(layer, Path.cwd())
    require(
        isinstance(layer, type),
        "layer",
        layer,
        "must be a class, FILE.py:CLASS or package.module:CLASS",
    )
    home = layer.__module__
    if "." in home:
        return Layer(name=f"{home}:{layer.__name__}")
    if (
        home != "__main__"
    ):  # of the current folder, perhaps, in which no other process looks for modules
        return read_layer(f"{inspect.getfile(layer)}:{layer.__name__}", Path.cwd())
    # inspect has no source of a class of a cell, but the functions in it know where they were
    # compiled
    made = (inspect.unwrap(one) for one in vars(layer).values() if inspect.isfunction(one))
    texts = ("".join(linecache.getlines(one.__code__.co_filename)) for one in made)
    is_there = re.compile(rf"^class {layer.__name__}\b", re.MULTILINE)
    text = next(filter(is_there.search, texts), "")
    rule = "has no source here; write it to a file (%%writefile layer.py), and give layer.py:CLASS"
    require(bool(text), "layer", layer.__name__, rule)
    source, missing = _definitions(text, layer.__name__)
    rule = f"uses {', '.join(missing[:4])}, no import, function, class or constant of its cell: write it there, too"
    require(not missing, "layer", layer.__name__, rule)
    return Layer(name=f"cell.py:{layer.__name__}", source=source)


def _definitions(text: str, kind: str) -> tuple[str, list[str]]:
    """The class `kind` of a Python text, with the imports, functions, classes and constants at its
    top level that the class uses; and the names that it uses and that are not there.
    """
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in ast.parse(text).body if isinstance(node, kept) or _is_constant(node))
    parts = [(f"{part}\n", *_names(part)) for part in map(ast.unparse, nodes)]
    needed, count = {kind, "annotations"}, 0  # of __future__
    while len(needed) > count:
        count = len(needed)
        needed |= {name for _, own, used in parts if own & needed for name in used}
    known = {*dir(builtins), "annotations", "__name__"}.union(*(own for _, own, _ in parts))
    return "".join(part for part, own, _ in parts if own & needed), sorted(needed - known)


def _is_constant(node: ast.stmt) -> bool:
    """Whether it gives a name a value without a call: a number, a tuple, a class of a module, a
    lambda.
    """
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    runs = (
        value
        and not isinstance(value, ast.Lambda)
        and any(isinstance(part, ast.Call) for part in ast.walk(value))
    )
    return value is not None and not runs


def _names(text: str) -> tuple[set[str], set[str]]:
    """The names that a text defines at its top level, and those that it uses without defining them
    inside.
    """
    top = symtable.symtable(text, "cell", "exec")
    tables, used = [top], set[str]()
    for table in tables:  # grows by what each holds
        tables += table.get_children()
        found = (name for name in table.get_symbols() if name.is_referenced())
        used |= {name.get_name() for name in found if table is top or name.is_global()}
    own = {
        name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()
    }
    return own, used - own
