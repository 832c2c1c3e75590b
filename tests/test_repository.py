"""The repository holds together: one list of versions, clean notebooks."""

import functools
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from support import REPOSITORY
from test_architecture import imports


def pins(name: str) -> dict[str, list[str]]:
    """The versions in a list of requirements or a lock, by normalized name: several where Pythons
    differ.
    """
    pinned: dict[str, list[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==([\w.]+)", (REPOSITORY / name).read_text(), re.M
    ):
        pinned.setdefault(normalized(package), []).append(version)
    return pinned


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@functools.cache
def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def dev_group() -> dict[str, list[str]]:
    group = project()["optional-dependencies"]["dev"]
    return {normalized(line.split("==")[0]): line.split("==")[1:] for line in group}


CORE = """
import sys
class Missing:
    def find_spec(name, *_):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from trilane.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("logs parse docs/examples/restart/part1.log", 0, "iterations 100"),
        ("run all --study x", 2, "is installed by pip install -e '.[notebooks]' in a clone"),
        (
            "measure machine {}/m.json",
            2,
            "torch=missing: is installed by pip install -e '.[train]' in a clone",
        ),
    ],
)
def test_the_core_needs_no_extra_and_says_which_brings_what_is_missing(
    command, code, says, tmp_path
):
    """In a process that can import nothing of the extras."""
    core = {normalized(re.match(r"[\w-]+", line)[0]) for line in project()["dependencies"]}
    names = pins("requirements.txt").keys() - core
    modules = sorted(
        m
        for m, owners in packages_distributions().items()
        if {normalized(o) for o in owners} & names
    )
    words = [word.format(tmp_path) for word in command.split()]
    program = [sys.executable, "-P", "-c", CORE.replace("MISSING", repr(modules)), *words]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_the_locks_hold_the_versions_that_are_asked_for_each_with_a_hash():
    locked = pins("requirements.lock") | pins("requirements-cuda.lock")
    assert pins("requirements.txt").items() <= locked.items()
    assert dev_group().items() <= pins("requirements-dev.lock").items()
    assert not dev_group().keys() & pins("requirements.txt").keys(), (
        "a user installs what only tests need"
    )
    assert not [name for name in pins("requirements.lock") if name.startswith(("nvidia", "cuda"))]
    both = pins("requirements-dev.lock").keys() & locked.keys()
    assert all(pins("requirements-dev.lock")[name] == locked[name] for name in both)
    assert "+cu126" in (REPOSITORY / "requirements-cuda126.lock").read_text().splitlines()[1]
    for name in (
        "requirements.lock",
        "requirements-cuda.lock",
        "requirements-cuda126.lock",
        "requirements-dev.lock",
    ):
        entries = re.split(r"^(?=[a-zA-Z])", (REPOSITORY / name).read_text(), flags=re.M)[1:]
        assert entries and all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def extras() -> set[str]:
    """What a user may install beside requirements.txt, as it needs CUDA."""
    lists = project()["optional-dependencies"].values()
    return {normalized(re.match(r"[\w.-]+", line)[0]) for lines in lists for line in lines}


def test_what_is_imported_is_pinned():
    """Not left to come along with something else; only tests and benchmarks use the extra dev."""
    owners, known = (
        packages_distributions(),
        pins("requirements.txt") | {name: [] for name in extras()},
    )
    ours = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").glob("*.py")]
    packages = {path.parent.name for path in (REPOSITORY / "lib").glob("*/__init__.py")}
    own = {path.stem for path in ours} | packages | set(sys.stdlib_module_names)
    unpinned = set()
    for path in [*ours, *(REPOSITORY / "lib").rglob("*.py")]:
        named = (known | dev_group() if path in ours else known).keys()
        for name in {n.split(".")[0] for n in imports(path)} - own:
            if not {normalized(package) for package in owners.get(name, [name])} & named:
                unpinned.add((str(path.relative_to(REPOSITORY)), name))
    assert not unpinned


def notebooks() -> dict[str, list[dict[str, Any]]]:
    """The cells of each notebook."""
    found = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
    return {path.stem: json.loads(path.read_text())["cells"] for path in found}


def test_a_source_notebook_holds_no_outputs():
    code = [
        (name, cell)
        for name, cells in notebooks().items()
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    assert not {
        name for name, cell in code if cell["outputs"] or cell["execution_count"] is not None
    }


def test_a_notebook_is_a_question_with_one_typed_and_commented_cell_of_parameters():
    """`papermill --help-notebook` is made of it."""
    for name, cells in notebooks().items():
        assert "".join(cells[0]["source"]).splitlines()[0].endswith("?"), name
        tagged = [
            "".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])
        ]
        assert len(tagged) == 1, name
        assert all(
            re.fullmatch(r"\w+: (str|int|float|bool) = .+  # .+", line)
            for line in tagged[0].splitlines()
        ), name
