"""The repository holds together: one list of versions, clean notebooks."""

import json
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
import yaml
from support import REPOSITORY
from test_architecture import imports


def pins(name: str) -> dict[str, str]:
    """The versions in a list of requirements or a lock, by normalized name."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", (REPOSITORY / name).read_text(), re.M)
    return {normalized(package): version for package, version in found}


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def dev_group() -> dict[str, str]:
    group = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    return {normalized(line.split("==")[0]): line.split("==")[1] for line in group}


def test_environment_yml_sets_up_what_the_makefile_does():
    """As far as it can be held without conda: its structure, the list it reads, the build of torch for V100."""
    text = (REPOSITORY / "environment.yml").read_text()
    values = yaml.safe_load(text)
    assert set(values) == {"name", "channels", "dependencies"} and values["channels"] == ["conda-forge"]
    *conda, pip = values["dependencies"]
    assert conda == ["python=3.11", "pip", "git"] and pip == {"pip": ["-r requirements.txt", "-e ."]}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == "==3.11.*"
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"]["file"] == "requirements.txt"
    assert re.search(r"# - --extra-index-url \S+/cu126", text), "the V100 variant is missing"


def test_the_locks_hold_the_versions_that_are_asked_for_each_with_a_hash():
    locked = pins("requirements.lock") | pins("requirements-cuda.lock")
    assert pins("requirements.txt").items() <= locked.items()
    assert dev_group().items() <= pins("requirements-dev.lock").items()
    assert not dev_group().keys() & pins("requirements.txt").keys(), "a user installs what only tests need"
    assert not [name for name in pins("requirements.lock") if name.startswith(("nvidia", "cuda"))]
    both = pins("requirements-dev.lock").keys() & locked.keys()
    assert all(pins("requirements-dev.lock")[name] == locked[name] for name in both)
    for name in ("requirements.lock", "requirements-cuda.lock", "requirements-dev.lock"):
        entries = re.split(r"^(?=[a-zA-Z])", (REPOSITORY / name).read_text(), flags=re.M)[1:]
        assert entries and all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize(("folder", "more"), [("lib", False), ("tests", True), ("benchmarks", True)])
def test_what_is_imported_is_pinned(folder, more):
    """Not left to come along with something else; only tests and benchmarks use the group dev."""
    named = pins("requirements.txt") | (dev_group() if more else {})
    owners = packages_distributions()
    ours = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").glob("*.py")]
    own = {path.stem for path in ours} | {"trilane"}
    for path in (REPOSITORY / folder).rglob("*.py"):
        for name in {n.split(".")[0] for n in imports(path)} - set(sys.stdlib_module_names) - own:
            assert {normalized(package) for package in owners.get(name, [name])} & named.keys(), f"{path}: {name}"


def notebooks():
    return sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_a_source_notebook_holds_no_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_a_notebook_tells_and_the_library_computes(path):
    """STYLE: one question, one typed and commented parameters cell, at most 20 lines a cell, no def, no %run."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert "".join(cells[0]["source"]).splitlines()[0].endswith("?")
    tagged = ["".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    assert all(re.fullmatch(r"\w+: (str|int|float|bool) = .+  # .+", line) for line in tagged[0].splitlines())
    assert all(len(source.splitlines()) <= 22 for source in code)
    assert not [source for source in code if re.search(r"^\s*(def |%run)", source, re.M)]
