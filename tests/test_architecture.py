"""The packages stand in one order, each import points down it, and the whole stays small.

A budget may fall. What raises one says in its commit what leaves for it: all together are never above MOST_LINES.
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

from support import REPOSITORY

LIB = REPOSITORY / "lib/trilane"
# The packages, lowest first, and the most lines of each, docstrings included; behind a number stands the aim.
BUDGETS = {
    "utils": 1149,  # 600
    "config": 1825,  # 1450
    "workspace": 1909,  # 1250
    "logs": 2536,  # 2150
    "costmodel": 3403,  # 2600
    "interop": 748,  # 600
    "planning": 1311,  # 1250
    "diagnose": 1897,  # 1800
    "engine": 6743,  # 4370
    "launch": 970,  # 730
    "analysis": 2185,  # 1900
    "forecasting": 1728,  # 1350
    "slurm": 3313,  # 2650
    "report": 1618,  # 1500
    "cli": 1301,  # 800
}
ORDER = tuple(BUDGETS)
MOST_LINES = 32_794  # 25,000
MOST_FILES = 210  # 170
MOST_BYTES = 50.9  # a line, on average, not by denser lines: 50
MOST_CONSTANTS = 10.2  # of modules, per 1,000 lines
LEAST_COMMENTS = 2.1  # lines of reasons per 100 of code: 3
MOST_TEST_LINES = 22_675  # 15,000
MOST_WORDS = 33_050  # of Markdown, without the reference, which the code writes


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


def test_no_modules_import_each_other():
    names = {".".join(("trilane", *path.relative_to(LIB).with_suffix("").parts)): path for path in modules()}
    graph = {name: {n for n in imports(path) if n in names} - {name} for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_every_package_is_within_its_budget():
    lines = dict.fromkeys(BUDGETS, 0)
    for path in modules():
        lines[package(path)] += path.read_text().count("\n")
    assert not {name: (count, BUDGETS[name]) for name, count in lines.items() if count > BUDGETS[name]}


def test_the_library_stays_small():
    texts = [path.read_text() for path in LIB.rglob("*.py")]
    lines = sum(text.count("\n") for text in texts)
    assert lines <= MOST_LINES
    assert len(texts) <= MOST_FILES
    assert sum(map(len, texts)) / lines <= MOST_BYTES
    assert sum(map(constants, texts)) / lines * 1000 <= MOST_CONSTANTS
    stripped = [line.strip() for text in texts for line in text.splitlines()]
    comments = sum(line.startswith("#") for line in stripped)
    assert comments / sum(bool(line) for line in stripped) * 100 >= LEAST_COMMENTS


def constants(text: str) -> int:
    """How many names in capitals the top level of a module assigns."""
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.Assign | ast.AnnAssign)]
    targets = [t for n in nodes for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
    names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return sum(bool(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)) for name in names)


def test_tests_and_pages_stay_small():
    assert sum(path.read_text().count("\n") for path in (REPOSITORY / "tests").rglob("*.py")) <= MOST_TEST_LINES
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "outputs").glob("*.md")]
    assert sum(len(p.read_text().split()) for p in pages if p.parent.name != "reference") <= MOST_WORDS


def test_only_the_engine_imports_torch_and_its_friends():
    heavy = ("torch", "deepspeed", "megatron", "transformers", "trilane.engine")
    assert not {
        (str(path.relative_to(LIB)), name)
        for path in modules()
        for name in imports(path)
        if package(path) != "engine" and any(f"{name}.".startswith(f"{h}.") for h in heavy)
    }


# documented; the attribute of our own Engine; names of PyTorch's operators
KNOWN_PRIVATE = ("os._exit", "_replace", "engine._optimizer", "aten._")


def test_only_patches_use_private_names_of_libraries():
    """Or replace what is theirs; `cpu` has those into which 'cuda' is written."""
    others = [p for p in (LIB / "engine").rglob("*.py") if p.name not in ("patches.py", "cpu.py")]
    uses = [(str(p.relative_to(LIB)), use) for p in others for use in private_uses(p)]
    assert not [use for use in uses if not any(known in use[1] for known in KNOWN_PRIVATE)]


def private_uses(path: Path) -> set[str]:
    """Names with an underscore of objects not the file's own, and what it sets in a library."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    owned = {"self", "cls", "super()"}
    libraries = {"torch", "deepspeed"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("trilane"):
            libraries |= {alias.asname or alias.name for alias in node.names}
    uses = {name for name in imports(path) if re.search(r"(^|\.)_[a-zA-Z]", name)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner, is_set = ast.unparse(node.value), isinstance(node.ctx, ast.Store)
            is_private = re.match("_[a-zA-Z]", node.attr) and owner not in owned
            if is_private or (is_set and owner.partition(".")[0].partition("(")[0] in libraries):
                uses.add(f"{owner}.{node.attr}")
    return uses


def test_only_the_command_line_parses_arguments():
    """The engine's own processes (`python -m trilane.engine...`) read sys.argv by hand."""
    parsers = {"argparse", "click", "optparse", "getopt"}
    others = [path for path in modules() if package(path) != "cli"]
    others.remove(LIB / "interop/torch_dist.py")  # Megatron-LM saves its arguments as an argparse.Namespace
    assert not [str(path.relative_to(LIB)) for path in others if {n.split(".")[0] for n in imports(path)} & parsers]


def test_every_process_is_started_by_one_module():
    """Whose environment() keeps what lies in the current folder from being run."""
    starters = r"^ *(import|from) (subprocess|multiprocessing|pty)\b|\bos\.(exec|spawn|posix_spawn|fork|system|popen)"
    found = {p.relative_to(LIB) for p in LIB.rglob("*.py") if re.search(starters, p.read_text(), re.M)}
    assert found == {Path("utils/process.py")}


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
