"""The repository holds together: one list of versions, arrows that point down, clean notebooks."""

import ast
import json
import re
from pathlib import Path

import pytest
from support import REPOSITORY

LIB = REPOSITORY / "lib/trilane"
FLOORS = [
    "checks files shape hardware topology systems ramp plan checkpoints fingerprint",
    "columns constants layertime memory timing calibration fitting posterior prediction",
    "space blocks search whatif search_door sizing published shape_rules inverse size_door capacity "
    "schedule pace stops montecarlo request calendar energy calendar_door rivals",
    "launch again outcome parent progress watch store deepspeed_config deepspeed_read deepspeed_keys "
    "ds_config_door equality verify megatron_args megatron_limits megatron_read megatron_text "
    "megatron_door diagnose beat flight capture ring watchdog bisect sites job_request script directives slurm "
    "probe ledger",
    "finding guard guard_cost guard_place guard_script",
    "logs rows setup window tflops phases health curve measure benchmark parse_door many_logs seedtable "
    "hang_door stragglers_door capture_door trace_door restart_door rehearse",
    "lint scoring backtest compare compare_door humps spikes spikes_door nextrun gather learning",
    "node_loss attempt standing jobs job_door sweep sweep_door chain chain_door monitor monitor_door",
    "plots backtest_plots tables explore report notebook __main__ measured_plots sizing_plots "
    "calendar_plots decision hang_plots run_door bench_door",
]


def imports(path: Path) -> set[str]:
    """Every module that the file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room(path: Path) -> str:
    return path.relative_to(LIB).parts[0].removesuffix(".py")


def modules():
    return [p for p in sorted(LIB.rglob("*.py")) if room(p) not in ("__init__", "engine")]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(LIB)))
def test_a_room_imports_only_its_own_floor_or_lower_ones(path):
    floor = {name: i for i, names in enumerate(FLOORS) for name in names.split()}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "trilane" and len(parts) > 1 and parts[1] in floor:
            assert floor[parts[1]] <= floor[room(path)], f"{room(path)} imports {name}, which stands above it"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(LIB)))
def test_only_the_engine_imports_torch_and_its_friends(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"torch", "deepspeed", "megatron", "transformers"}
    assert not any(name.startswith("trilane.engine") for name in imports(path))


def test_the_library_never_imports_a_notebook():
    assert not any("notebooks" in name for path in modules() for name in imports(path))


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
