"""Layers of a researcher's own: one loss curve on each topology that they allow; a line for what
would not train.
"""

import functools
import json
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SHAPE, changed, losses_and_norms, run_folder, small_plan

from trilane.config.layer import Layer, layer_of, read_layer
from trilane.config.plan import Plan, plan_from_json, read_plan
from trilane.workspace.checkpoints import name_of

HERE = Path(__file__).parent
Truth = Callable[[str], list[list[float]]]


def own_plan(data: Path, kind: str, **topology: object) -> Plan:
    plan = small_plan(data, iters=3, source="mock", shape=replace(SHAPE, num_layers=2), **topology)
    return replace(plan, layer=read_layer(f"own_layers.py:{kind}", HERE))


@pytest.fixture(scope="module")
def alone(fork: Callable, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """[loss, gradient norm] of a layer's iterations in one process."""

    @functools.cache
    def of(kind: str) -> list[list[float]]:
        folder = run_folder(own_plan(data, kind), tmp_path_factory.mktemp("alone") / "run")
        fork(1, folder)
        return losses_and_norms(folder)

    return of


ALL = {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "recompute": "full"}
ROWS = {
    "QKNorm TP2": {"tp": 2},
    "QKNorm TP2 DP2, all else": ALL,
    "Mixer TP2": {"tp": 2},
    "Averages PP2 DP2": {"pp": 2, "dp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_own_layer_has_one_loss_curve(name: str, fork, alone: Truth, data, tmp_path):
    """Initial values, and gradients of what tensor-parallel ranks hold whole, are those of one
    process.
    """
    kind = name.split()[0]
    plan = own_plan(data, kind, **ROWS[name])
    folder = run_folder(plan, tmp_path / "run")
    fork(plan.topology.gpus, folder)
    pairs = zip(losses_and_norms(folder), alone(kind), strict=True)
    for (loss, norm), (right_loss, right_norm) in pairs:
        assert loss == pytest.approx(right_loss, abs=1e-5, rel=0)
        assert norm == pytest.approx(right_norm, rel=1e-5)
    assert alone(kind)[-1] < alone(kind)[0]


@pytest.mark.slow
def test_a_checkpoint_of_an_own_layer_goes_on_elsewhere(fork, alone: Truth, data, tmp_path):
    """From TP 2 to one process: what the layer divides is put together."""
    plan = changed(own_plan(data, "Mixer", tp=2), "run", exit_iteration=2)
    first = run_folder(plan, tmp_path / "first")
    fork(2, first)
    assert (first / "checkpoints" / name_of(2)).is_dir()
    plan = changed(own_plan(data, "Mixer"), "run", load=str(first))
    second = run_folder(plan, tmp_path / "second")
    fork(1, second)
    assert losses_and_norms(second)[-1] == pytest.approx(alone("Mixer")[-1], abs=1e-5)


HEAD = """import torch
from torch import nn
class Own(nn.Module):
    def __init__(self, config, layer_number):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.hidden_size)
"""
FORWARD = "    def forward(self, x):\n        return "
QK_NORM = (HERE / "own_layers.py").read_text().replace("QKNorm", "Own")
# the text of the file, and the line
BAD = [
    (f"{HEAD}{FORWARD}self.up(x)[:-1]", "returns (63, 2, 64) of torch.float32, must return"),
    (f"{HEAD}{FORWARD}self.up(x.view(-1, 3))", "fails (line 8, RuntimeError: "),
    (
        f"{HEAD}        self.mean = nn.BatchNorm1d(64)\n{FORWARD}x",
        "layer.mean.running_mean is state",
    ),
    (HEAD.replace("config, layer_number", "width"), "cannot be made (TypeError"),
    ("Own = 3", "Own is no class of torch.nn.Module"),
    ("class Own(:", "cannot be imported (SyntaxError: invalid syntax"),
    ("import sys; sys.exit(0)", "cannot be imported (line 1, SystemExit"),
    (QK_NORM, ""),
]
TRY = """
from pathlib import Path
from megatron.core import parallel_state
from trilane.config.plan import read_plan
from trilane_engine.model import gpt, own_layer, rng
parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
rng.seed_streams(1)
for file in sorted(Path(PLACE).glob("*.json")):
    plan = read_plan(file)
    config = gpt.transformer_config(plan)
    try:
        spec = own_layer.own_spec(plan, gpt.layer_spec(plan.shape, config))
        module = spec.module(config=config, layer_number=1, submodules=spec.submodules)
        own_layer.try_out(plan, module)
        print()
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_would_not_train_is_one_line_that_names_it(ask, data, tmp_path):
    """As each rank does before a training starts."""
    for number, (source, _) in enumerate(BAD):
        layer = Layer(name="own.py:Own", source=source)
        plan = replace(own_plan(data, "Mixer", tp=2), layer=layer)
        (tmp_path / f"{number:02d}.json").write_text(json.dumps(plan.to_json()))
    lines = ask(small_plan(data, tp=2), f"PLACE = {str(tmp_path)!r}\n{TRY}").splitlines()
    for line, (_, rule) in zip(lines, BAD + BAD, strict=True):
        assert line.startswith(f"layer=own.py:Own: {rule}") if rule else line == "", (line, rule)


def test_a_plan_holds_the_text_of_its_layer(data, tmp_path):
    """All that a run needs: a file that changes later changes no run that is prepared."""
    plan = own_plan(data, "Mixer")
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert len({plan.id, replace(plan, layer=None).id, own_plan(data, "QKNorm").id}) == 3
    (tmp_path / "plan.json").write_text(json.dumps({**plan.to_json(), "layer": "mine.py:Mixer"}))
    (tmp_path / "mine.py").write_text((HERE / "own_layers.py").read_text())
    assert read_plan(tmp_path).layer == Layer(name="mine.py:Mixer", source=plan.layer.source)


def test_a_class_of_a_notebooks_cell_travels_with_what_the_cell_defines():
    """As ipykernel compiles a cell: its text is known by the name of a file that does not exist."""
    cell = "import json\nWIDTH = 4\nclass Own:\n    def forward(self): return WIDTH\n"
    linecache.cache["cell"] = (len(cell), None, cell.splitlines(keepends=True), "cell")
    names: dict[str, type] = {"__name__": "__main__"}  # type: ignore[dict-item]
    exec(compile(cell, "cell", "exec"), names)
    assert layer_of(names["Own"]) == Layer(name="cell.py:Own", source=cell)
    exec("class Lost: ...", names)
    with pytest.raises(ValueError, match=r"^layer=Lost: is in no file"):
        layer_of(names["Lost"])
