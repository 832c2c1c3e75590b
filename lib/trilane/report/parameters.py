"""The parameters of a notebook as its cell tagged `parameters` declares them, and copies of it with others.

Light enough for a command's --help.
"""

import ast
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.utils.validation import read_object, require_known
from trilane.workspace.installation import checkout, shipped
from trilane.workspace.run_folder import write_text
from trilane.workspace.study import Study


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
    return _parameters_of(read_object(path, "notebook", cells=list), str(path))


def edited_parameters(name: str) -> dict[str, Any]:
    """The defaults as committed of those parameters whose default in the checkout's notebook is another one now.

    JupyterLab saves what somebody tried into the file. Empty without a git checkout.
    """
    root, path = checkout(), path_of(name)
    if root is None:
        return {}
    show = ["git", "-C", str(root), "show", f"HEAD:./{path.relative_to(root)}"]
    done = subprocess.run(show, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # git is missing, or has no such file
        return {}
    now = {p.name: p.default for p in described_parameters(name)}
    committed = {p.name: p.default for p in _parameters_of(json.loads(done.stdout), show[-1])}
    return {
        field: ast.literal_eval(default)
        for field, default in committed.items()
        if field in now and now[field] != default
    }


def copy_into(study: Study, name: str, values: Mapping[str, Any]) -> tuple[Path, bool]:
    """The study's copy of a notebook to work on by hand, lab/NAME.ipynb, and whether it is new: one that exists stays.

    Its parameters are `values`, then those with which the study ran the notebook, then the defaults as committed.
    """
    path = study.folder / "lab" / f"{name}.ipynb"
    if path.exists():
        return path, False
    notebook = read_object(path_of(name), "notebook", cells=list)
    given = {**edited_parameters(name), **_executed_with(study.folder / f"{name}.ipynb"), **values, "study": study.name}
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            cell["source"] = _with_defaults("".join(cell["source"]), given)
    return write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"), True


def _executed_with(path: Path) -> dict[str, Any]:
    """The parameters with which papermill executed a notebook; none where it did not, or the file is damaged."""
    try:
        return dict(read_object(path, "notebook", metadata=dict)["metadata"]["papermill"]["parameters"])
    except (ValueError, KeyError, TypeError):
        return {}


def _with_defaults(source: str, values: Mapping[str, Any]) -> str:
    """The source of a cell of parameters with other defaults."""
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        name = _text(source, node.target) if isinstance(node, ast.AnnAssign) else ""
        if isinstance(node, ast.AnnAssign) and node.value is not None and name in values:
            line = lines[node.lineno - 1].encode()  # columns of ast count bytes
            value = repr(values[name]).encode()
            lines[node.lineno - 1] = (
                line[: node.value.col_offset] + value + line[node.value.end_col_offset :]
            ).decode()
    return "".join(lines)


def _parameters_of(notebook: Mapping[str, Any], origin: str) -> list[Parameter]:
    found = []
    try:
        tagged = ["".join(c["source"]) for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"notebook={origin}: must hold cells with `source` and `metadata`") from None
    for source in tagged:
        for node in ast.parse(source).body:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                name, kind, default = (_text(source, part) for part in (node.target, node.annotation, node.value))
                comment = source.splitlines()[node.lineno - 1][node.end_col_offset or 0 :].partition("#")[2].strip()
                found.append(Parameter(name=name, kind=kind, default=default, comment=comment))
    return found


def _text(source: str, node: ast.AST) -> str:
    return ast.get_source_segment(source, node) or ""
