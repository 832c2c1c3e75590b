"""The repository holds together: one list of versions, clean notebooks."""

import json
import re

import pytest
from support import REPOSITORY


def test_environment_yml_and_requirements_name_the_same_set_up():
    """environment.yml refers to requirements.txt and pins nothing itself but Python, so the two cannot drift."""
    text = (REPOSITORY / "environment.yml").read_text()
    active = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert "- python=3.11" in active and "- -r requirements.txt" in active and "- -e ." in active
    assert not [line for line in active if "==" in line]
    assert re.search(r"# - --extra-index-url \S+/cu126", text), "the V100 variant is missing"
    requirements = (REPOSITORY / "requirements.txt").read_text().splitlines()
    pins = [line for line in requirements if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9.]+", line) for line in pins)
    assert "torch==2.13.0" in pins
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    assert 'dynamic.dependencies.file = "requirements.txt"' in pyproject and "==" not in pyproject


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
