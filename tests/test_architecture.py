"""The packages stand in one order, and each import points down it."""

import ast
import functools
from pathlib import Path

from support import REPOSITORY

LIB = REPOSITORY / "lib/trilane"
ORDER = (
    "utils",
    "config",
    "workspace",
    "logs",
    "costmodel",
    "interop",
    "planning",
    "diagnose",
    "engine",
    "launch",
    "analysis",
    "forecasting",
    "slurm",
    "report",
    "cli",
)


def modules() -> list[Path]:
    return [p for p in sorted(LIB.rglob("*.py")) if p.parent != LIB]


def package(path: Path) -> str:
    return path.relative_to(LIB).parts[0]


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that the file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_nothing_but_packages_lies_at_the_top():
    top = {p.name for p in LIB.iterdir() if p.name != "__pycache__"}
    assert top == {"__init__.py", "__main__.py", "py.typed", "data", *ORDER}


def test_a_module_imports_only_its_own_package_or_lower_ones():
    upwards = [
        (str(path.relative_to(LIB)), name)
        for path in modules()
        for name in imports(path)
        if (parts := name.split("."))[0] == "trilane" and len(parts) > 1 and parts[1] in ORDER
        if ORDER.index(parts[1]) > ORDER.index(package(path))
    ]
    assert not upwards


def test_only_the_engine_imports_torch_and_its_friends():
    heavy = ("torch", "deepspeed", "megatron", "transformers", "trilane.engine")
    assert not {
        (str(path.relative_to(LIB)), name)
        for path in modules()
        for name in imports(path)
        if package(path) != "engine" and any(f"{name}.".startswith(f"{h}.") for h in heavy)
    }


def test_only_the_command_line_parses_arguments():
    """The engine's own processes (`python -m trilane.engine...`) read sys.argv by hand."""
    parsers = {"argparse", "click", "optparse", "getopt"}
    others = [path for path in modules() if package(path) != "cli"]
    assert not [str(path.relative_to(LIB)) for path in others if {n.split(".")[0] for n in imports(path)} & parsers]


def test_a_training_process_imports_no_post_mortem_code():
    """Neither directly nor through what it imports; the watchdog that diagnoses is a process of its own."""
    found: set[str] = set()
    queue = {str(p.relative_to(LIB.parent).with_suffix("")).replace("/", ".") for p in (LIB / "engine").rglob("*.py")}
    while queue:
        name = queue.pop()
        found.add(name)
        path = LIB.parent / name.replace(".", "/")
        file = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
        queue |= {n for n in imports(file) if n.startswith("trilane.")} - found if file else set()
    assert "trilane.workspace.heartbeat" in found
    assert not {name for name in found if name.startswith(("trilane.diagnose", "trilane.launch"))}
