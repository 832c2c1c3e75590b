"""The parameters of a notebook as its cell tagged `parameters` declares them; light enough for a command's --help."""

import ast
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.validation import read_object, require_known
from trilane.workspace.study import shipped


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One line of the cell: `name: kind = default  # comment`."""

    name: str
    kind: str
    default: str
    comment: str


def notebook_names() -> list[str]:
    """The names of all notebooks, such as `01_sizing`."""
    return sorted(path.stem for path in shipped("notebooks").glob("*.ipynb"))


def described_parameters(name: str) -> list[Parameter]:
    """The parameters of a notebook, in the order of their lines; ValueError for an unknown notebook."""
    return read_parameters(path_of(name))


def path_of(name: str) -> Path:
    """The source notebook of that name; ValueError for an unknown one."""
    require_known("notebook", name, notebook_names())
    return shipped("notebooks") / f"{name}.ipynb"


def read_parameters(path: Path) -> list[Parameter]:
    """The parameters of a notebook's file; ValueError where it is damaged."""
    cells = read_object(path, "notebook", cells=list)["cells"]
    found = []
    try:
        tagged = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"notebook={path}: must hold cells with `source` and `metadata`") from None
    for source in tagged:
        for node in ast.parse(source).body:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                name, kind, default = (_text(source, part) for part in (node.target, node.annotation, node.value))
                comment = source.splitlines()[node.lineno - 1][node.end_col_offset or 0 :].partition("#")[2].strip()
                found.append(Parameter(name=name, kind=kind, default=default, comment=comment))
    return found


def _text(source: str, node: ast.AST) -> str:
    return ast.get_source_segment(source, node) or ""
