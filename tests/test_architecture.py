"""The packages stand in one order, each import points down it, and the whole stays small.

Size is counted in tokens outside docstrings and comments, which no layout hides. The limit is the
aim; what has not reached it has today's figure beside it, which may fall and never rises.
"""

import ast
import functools
import graphlib
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import REPOSITORY

from trilane.utils import hooks

LIB = REPOSITORY / "lib"
# The packages of trilane, lowest first.
ORDER = tuple(
    [
        "utils",
        "config",
        "workspace",
        "logs",
        "costmodel",
        "interop",
        "forecasting",
        "planning",
        "launch",
        "analysis",
        "slurm",
        "report",
        "cli",
    ]
)
# What imports trilane, and neither trilane nor each other is imported by.
BESIDE = ("trilane_engine", "trilane_diagnose")
# What is counted: the aim, and what stands today.
TOKENS = {
    "trilane": (128_000, 136_900),
    "trilane_engine": (49_500, 49_300),
    "trilane_diagnose": (29_500, 28_600),
    "tests": (140_000, 140_000),
}
FORMS = {  # in lib, per 1,000 code lines
    "tokens": (9_500, 9_500),
    "if-expressions": (20, 20),
    "tuple assignments": (6, 6),
    "comprehensions": (45, 45),
}
LONG_TEXTS = 3  # of more than 200 characters, in lib
MOST_BYTES_OF_DATA = 248_000  # of lib, tables of rows left out
WORDS = (20_000, 20_000)  # of Markdown written by hand


def modules() -> list[Path]:
    """Those in a package; `trilane` itself and the command `python -m trilane` hold no code."""
    return [p for p in sorted(LIB.rglob("*.py")) if p.parent != LIB / "trilane"]


def package(path: Path) -> str:
    """The package of a module: a name of ORDER, or of BESIDE."""
    first, second, *_ = path.relative_to(LIB).parts
    return second if first == "trilane" else first


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
    top = {p.name for p in (LIB / "trilane").iterdir() if p.name != "__pycache__"}
    assert top == {"__init__.py", "__main__.py", "py.typed", "data", *ORDER}
    assert {p.parent.name for p in LIB.glob("*/__init__.py")} == {"trilane", *BESIDE}


def test_each_import_points_down():
    """What stands beside trilane imports trilane; nothing imports it but its own package."""
    graph = {name: {*ORDER[:rank]} for rank, name in enumerate(ORDER)}
    graph |= {name: {*ORDER} for name in BESIDE}
    assert not [
        (str(path.relative_to(LIB)), name)
        for path in modules()
        for name in imports(path)
        if (target := owner(name)) and target not in {*graph[package(path)], package(path)}
    ]


def owner(name: str) -> str:
    """The package that an imported name belongs to; "" for other libraries and for
    trilane itself.
    """
    first, _, rest = name.partition(".")
    if first in BESIDE:
        return first
    second = rest.partition(".")[0]
    return second if first == "trilane" and second in ORDER else ""


def test_no_modules_import_each_other():
    names = {".".join(path.relative_to(LIB).with_suffix("").parts): path for path in modules()}
    graph = {
        name: {n for n in imports(path) if n in names} - {name} for name, path in names.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_every_hook_is_there():
    for name, target in hooks.HOOKS.items():
        assert target.partition(".")[0] in BESIDE
        assert callable(hooks.hook(name)), name


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines that docstrings take."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines |= {*range(first.lineno, first.end_lineno + 1)}
    return lines


def tokens_by_line(text: str, skipped: set[int]) -> Counter[int]:
    """How many names, operators, numbers and texts each line has; an f-string is one text on every
    Python.
    """
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    opens, closes = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    lines, depth = Counter[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if depth == 0 and token.type in {*counted, opens} and token.start[0] not in skipped:
            lines[token.start[0]] += 1
        if token.type == opens:
            depth += 1
        if token.type == closes:
            depth -= 1
    return lines


@functools.cache
def measured(path: Path) -> Counter[str]:
    """The file's code lines, its tokens, and the forms that make code dense."""
    text = path.read_text()
    tree = ast.parse(text)
    skipped = docstring_lines(tree)
    lines = tokens_by_line(text, skipped)
    count = Counter[str](lines=len(lines), tokens=lines.total())
    for node in ast.walk(tree):
        match node:
            case ast.IfExp():
                count["if-expressions"] += 1
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                count["comprehensions"] += 1
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                count["tuple assignments"] += 1
            case ast.Constant(value=str() as words) if (
                len(words) > 200 and node.lineno not in skipped
            ):
                count["long texts"] += 1
    return count


def total(paths: Iterable[Path]) -> Counter[str]:
    return sum(map(measured, paths), Counter())


def check(figure: float, aim: float, today: float) -> None:
    """Fail above the aim where that was reached, else above what stands."""
    assert figure <= max(aim, today), (
        f"{figure:,.1f}: what leaves for it? At most {max(aim, today):,}, the aim is {aim:,}"
    )
    assert today <= aim or figure > 0.98 * today, (
        f"{figure:,.1f} stands now: write it down in place of {today:,}"
    )


@pytest.mark.parametrize("part", TOKENS)
def test_the_library_and_its_tests_stay_small(part: str):
    folder = REPOSITORY / "tests" if part == "tests" else LIB / part
    files = folder.rglob("*.py")
    check(total(files)["tokens"], *TOKENS[part])


@pytest.mark.parametrize("form", FORMS)
def test_code_is_plain(form: str):
    count = total(LIB.rglob("*.py"))
    check(count[form] / count["lines"] * 1000, *FORMS[form])


def test_no_code_hides_in_texts_or_data():
    assert total(LIB.rglob("*.py"))["long texts"] <= LONG_TEXTS
    files = [p for p in (LIB / "trilane/data").rglob("*") if p.is_file() and p.suffix != ".csv"]
    assert sum(p.stat().st_size for p in files) <= MOST_BYTES_OF_DATA


def test_pages_stay_short():
    pages = [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "outputs").glob("*.md"),
    ]
    check(sum(len(p.read_text().split()) for p in pages if p.parent.name != "reference"), *WORDS)


def test_only_the_engine_imports_torch_and_its_friends():
    heavy = ("torch", "deepspeed", "megatron", "transformers", "trilane_engine")
    assert not {
        (str(path.relative_to(LIB)), name)
        for path in modules()
        for name in imports(path)
        if package(path) != "trilane_engine" and any(f"{name}.".startswith(f"{h}.") for h in heavy)
    }


def test_every_process_is_started_by_one_module():
    """Whose environment() keeps what lies in the current folder from being run."""
    starters = r"^ *(import|from) (subprocess|multiprocessing|pty)\b|\bos\.(exec|spawn|posix_spawn|fork|system|popen)"
    found = {
        p.relative_to(LIB) for p in LIB.rglob("*.py") if re.search(starters, p.read_text(), re.M)
    }
    assert found == {Path("trilane/utils/process.py")}
